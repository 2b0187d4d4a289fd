"""Requests in flight: who may list and cancel them, and how a cancelled request ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.raw_http import check_all_free, outcome_of, outcomes_since, wait_for
from tests.e2e.served import Served, served

SECRET = "a prompt that nobody else may read"
LONG: dict[str, Any] = {"prompt": SECRET, "max_tokens": 4000, "ignore_eos": True}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4000}
STREAMED = (
    ("/generate", LONG),
    ("/v1/completions", LONG),
    ("/v1/chat/completions", CHAT | {"ignore_eos": True}),
    ("/v1/responses", {"input": SECRET, "max_output_tokens": 4000}),
    ("/v1/messages", CHAT | {"model": "sample", "stop_sequences": ["never to be written"]}),
)
FIRST, SECOND, ADMIN = ({"x-api-key": key} for key in ("first-key", "second-key", "admin-key"))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An open server that runs one choice at a time, so that others wait."""
    log = tmp_path_factory.mktemp("narrow") / "server.log"
    with served(log, "--max-num-seqs", "1", "--served-model-name", "sample") as running:
        yield running


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two keys and an admin key."""
    flags = ("--api-key", "first-key", "--api-key", "second-key")
    environment = {"GLINT_ADMIN_API_KEY": "admin-key"}
    log = tmp_path_factory.mktemp("keyed") / "server.log"
    with served(log, *flags, "--served-model-name", "sample", environment=environment) as running:
        yield running


def listing(server: Served, headers: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """The requests in flight that a key sees."""
    answer = httpx.get(f"{server.url}/requests", headers=headers, timeout=30)
    assert answer.status_code == 200 and SECRET not in answer.text
    return list(answer.json()["data"])


def cancel(server: Served, request_id: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """Cancel a request."""
    return httpx.delete(f"{server.url}/requests/{request_id}", headers=headers, timeout=30)


@contextmanager
def sent(
    server: Served, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
) -> Iterator[tuple[dict[str, Any], Future[httpx.Response]]]:
    """A request that was sent and is listed since, and its answer to come."""
    known = {entry["id"] for entry in listing(server, headers)}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{server.url}{path}", json=body, headers=headers, timeout=120)
        new: list[dict[str, Any]] = []

        def is_listed() -> bool:
            new[:] = [entry for entry in listing(server, headers) if entry["id"] not in known]
            return bool(new) and new[0]["state"] != "preparing"

        wait_for(is_listed, f"{path} is listed")
        yield new[0], answer


def wait_running(server: Served, request_id: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """Wait until a request has output; gives its entry."""
    found: list[dict[str, Any]] = []

    def has_output() -> bool:
        found[:] = [entry for entry in listing(server, headers) if entry["id"] == request_id]
        return found[0]["output_tokens"] > 2

    wait_for(has_output, f"{request_id} has output")
    return found[0]


def check_ending(answer: httpx.Response, is_streamed: bool, message: str) -> None:
    """The client got the error: as its whole answer, or behind what was streamed so far."""
    if is_streamed:
        assert answer.status_code == 200
        assert message in answer.text.strip().splitlines()[-1]
    else:
        assert answer.status_code == 410
        assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_running_request_is_cancelled(narrow: Served, is_streamed: bool, choices: int) -> None:
    narrow.wait_idle()
    before = narrow.count_outcomes()
    with sent(narrow, "/generate", LONG | {"stream": is_streamed, "n": choices}) as (entry, answer):
        running = wait_running(narrow, entry["id"])
        assert running | {"age_seconds": 0, "output_tokens": 0} == {
            "id": entry["id"],
            "route": "/generate",
            "state": "running",
            "age_seconds": 0,
            "choices": choices,
            "prompt_tokens": running["prompt_tokens"],
            "output_tokens": 0,
        }
        assert running["age_seconds"] > 0 and running["prompt_tokens"] > 5
        assert narrow.stats()["pages"]["held"] > 0
        assert cancel(narrow, entry["id"]).json()["cancelled"] is True
        check_ending(answer.result(), is_streamed, "cancelled with the key that sent it")
    (line,) = outcomes_since(narrow, before, 1)
    assert (line["outcome"], line["reason"]) == ("cancelled", "cancelled_by_owner")
    assert line["status"] == ("200" if is_streamed else "410") and line["request_id"] == entry["id"]
    check_all_free(narrow)
    assert listing(narrow) == []


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_queued_request_is_cancelled(narrow: Served, is_streamed: bool, choices: int) -> None:
    narrow.wait_idle()
    before = narrow.count_outcomes()
    with sent(narrow, "/generate", LONG) as (first, first_answer):
        wait_running(narrow, first["id"])
        with sent(narrow, "/generate", LONG | {"stream": is_streamed, "n": choices}) as (entry, answer):
            assert (entry["state"], entry["output_tokens"]) == ("waiting", 0)
            assert narrow.stats()["requests_waiting"] == choices
            assert cancel(narrow, entry["id"]).status_code == 200
            check_ending(answer.result(), is_streamed, "cancelled with the key that sent it")
            wait_for(lambda: narrow.stats()["requests_waiting"] == 0, "nothing waits")
            assert [entry["id"] for entry in listing(narrow)] == [first["id"]]
            assert outcome_of(narrow, entry["id"])["reason"] == "cancelled_by_owner"
        cancel(narrow, first["id"])
        assert first_answer.result().status_code == 410
    assert {line["outcome"] for line in outcomes_since(narrow, before, 2)} == {"cancelled"}
    check_all_free(narrow)


@pytest.mark.parametrize(("path", "body"), STREAMED, ids=[path for path, _ in STREAMED])
def test_every_stream_ends_with_the_error_of_its_api(narrow: Served, path: str, body: dict[str, Any]) -> None:
    narrow.wait_idle()
    with sent(narrow, path, body | {"stream": True}) as (entry, answer):
        cancel(narrow, entry["id"])
        text = answer.result().text
    last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
    assert "cancelled with the key that sent it" in last["error"]["message"]
    assert outcome_of(narrow, entry["id"])["reason"] == "cancelled_by_owner"


def test_the_official_client_does_not_send_a_cancelled_request_again(narrow: Served) -> None:
    narrow.wait_idle()
    before = narrow.count_outcomes()
    with (
        openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", timeout=120) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        extra = {"ignore_eos": True}
        answer = pool.submit(
            client.completions.create, model="sample", prompt=SECRET, max_tokens=4000, extra_body=extra
        )
        wait_for(lambda: bool(listing(narrow)), "the request is listed")
        cancel(narrow, listing(narrow)[0]["id"])
        with pytest.raises(openai.APIStatusError, match="cancelled") as caught:
            answer.result()
    assert caught.value.status_code == 410
    outcomes_since(narrow, before, 1)


def test_an_ended_request_and_an_unknown_one_are_not_found(narrow: Served) -> None:
    answer = httpx.post(f"{narrow.url}/generate", json=LONG | {"max_tokens": 1}, timeout=60)
    for request_id in (answer.json()["id"], "gen-unknown", "é" * 500):
        refused = cancel(narrow, request_id)
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "request_not_found"
    assert httpx.post(f"{narrow.url}/requests", timeout=30).status_code == 405
    deleted = httpx.get(narrow.url, timeout=30).json()["routes"]["DELETE"]
    assert deleted == ["/v1/responses/{response_id}", "/requests/{request_id}"]


def test_a_key_reaches_its_own_requests_and_the_admin_key_all(keyed: Served) -> None:
    with sent(keyed, "/generate", LONG, FIRST) as (own, own_answer):
        assert [entry["id"] for entry in listing(keyed, FIRST)] == [own["id"]]
        assert listing(keyed, SECOND) == []
        assert [entry["id"] for entry in listing(keyed, ADMIN)] == [own["id"]]
        shown = [httpx.get(f"{keyed.url}/requests", headers=key, timeout=30).json()["shown"] for key in (FIRST, ADMIN)]
        assert shown == ["own", "all"]
        assert cancel(keyed, own["id"]).status_code == 401
        assert cancel(keyed, own["id"], SECOND).status_code == 404
        wait_running(keyed, own["id"], FIRST)
        assert cancel(keyed, own["id"], ADMIN).status_code == 200
        check_ending(own_answer.result(), False, "the administrator of the server cancelled the request")
    line = outcome_of(keyed, own["id"])
    assert (line["outcome"], line["reason"]) == ("cancelled", "cancelled_by_admin")
    with sent(keyed, "/generate", LONG, SECOND) as (own, own_answer):
        assert cancel(keyed, own["id"], SECOND).status_code == 200
        assert own_answer.result().status_code == 410
    assert outcome_of(keyed, own["id"])["reason"] == "cancelled_by_owner"


def test_the_admin_key_opens_every_route_and_is_in_no_log(keyed: Served) -> None:
    for path in ("/stats", "/v1/models", "/metrics"):
        assert httpx.get(f"{keyed.url}{path}", headers=ADMIN, timeout=30).status_code == 200
    assert "admin-key" not in keyed.log.read_text()


def test_stats_tell_what_the_engine_is(narrow: Served) -> None:
    httpx.post(f"{narrow.url}/generate", json=LONG | {"max_tokens": 8}, timeout=60)
    stats = narrow.stats()
    engine, plan, minute = stats["engine"], stats["memory_plan"], stats["last_minute"]
    assert isinstance(engine, dict) and isinstance(plan, list) and isinstance(minute, dict)
    assert engine["device"] == "cpu" and engine["kernels"] not in ("auto", "") and engine["max_requests"] == 1
    assert {"weights", "page cache"} <= {row["name"] for row in plan}
    assert minute["output_tokens_per_second"] > 0 and minute["prompt_tokens_per_second"] > 0
    assert 0 < minute["time_to_first_token_seconds"]["p50"] <= minute["time_to_first_token_seconds"]["p99"]
    assert stats["uptime_seconds"] > 0
