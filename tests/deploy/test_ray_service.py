"""Glint on a real Ray cluster of this machine: two CPU replicas, one that is killed under load, and ones that drain."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.deploy.ray_served import RayService, ray_service, wait_for
from tests.e2e.served import ROOT

KEY = "sk-of-the-ray-tests"
QUESTION = "Tell me a long story about the sea."
NUM_CLIENTS = 8
REQUESTS_PER_CLIENT = 3
NUM_TOKENS = 40
NUM_SESSIONS = 16
PATIENCE_SECONDS = 90.0
NOTICE_SECONDS = 5.0
END_SECONDS = 1.5
REQUESTS_AFTER_A_FAILURE = 12
FAULTY_STEP = 60
TEST_LIBRARY = os.environ.get("GLINT_TEST_LIBRARY") or str(ROOT / "build" / "libglint_cpu_test.so")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the key of these tests."""
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def service(sample_model: Path, key_file: Path) -> Iterator[RayService]:
    """Two replicas of the sample model, one core each, started by the documented command."""
    with ray_service() as running:
        running.run("deploy.ray_app:app", "replicas=2", f"model={sample_model}", f"api_key_file={key_file}")
        yield running


@pytest.fixture(scope="module")
def client(service: RayService) -> Iterator[openai.OpenAI]:
    """The official client; a request that fails is not tried again."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE_SECONDS) as made:
        yield made


@dataclass(frozen=True)
class Ended:
    """How a request ended for its client: in a whole answer, or in an error that the client was shown."""

    began_at: float
    request_id: str = ""
    text: str = ""
    error: str = ""


class Caller:
    """Sends greedy requests of a fixed length; `begun` counts the streams that have brought something.

    An answer that is neither whole nor an error, or that does not come, fails the test.
    """

    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client
        self._model = client.models.list().data[0].id
        self.begun = threading.Semaphore(0)

    def send(self, question: str, num_tokens: int, session: str | None = None, **more: Any) -> Any:
        """One request as the official client sends it."""
        return self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": question}],
            max_tokens=num_tokens,
            temperature=0.0,
            extra_body={"ignore_eos": True},
            extra_headers={} if session is None else {"x-session-id": session},
            **more,
        )

    def ask(self, *, is_streaming: bool, num_tokens: int = NUM_TOKENS) -> Ended:
        """Send a request and tell how it ended."""
        began_at = time.monotonic()
        try:
            ask = self._ask_streaming if is_streaming else self._ask_whole
            return ask(began_at, num_tokens)
        except (openai.APITimeoutError, httpx.TimeoutException):
            raise
        except (openai.APIStatusError, openai.APIConnectionError, httpx.TransportError) as error:
            return Ended(began_at, error=f"{type(error).__name__}: {error}")

    def _ask_whole(self, began_at: float, num_tokens: int) -> Ended:
        answer = self.send(QUESTION, num_tokens)
        assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == num_tokens
        return Ended(began_at, answer.id, answer.choices[0].message.content)

    def _ask_streaming(self, began_at: float, num_tokens: int) -> Ended:
        parts: list[str] = []
        request_id, usage, reason = "", None, None
        for chunk in self.send(QUESTION, num_tokens, stream=True, stream_options={"include_usage": True}):
            request_id, usage = chunk.id, chunk.usage
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                if choice.delta.content:
                    if not parts:
                        self.begun.release()
                    parts.append(choice.delta.content)
        assert reason == "length" and usage is not None and usage.completion_tokens == num_tokens
        return Ended(began_at, request_id, "".join(parts))


def test_the_official_client_is_answered_streaming_and_not(client: openai.OpenAI) -> None:
    caller = Caller(client)
    whole, streamed = caller.ask(is_streaming=False), caller.ask(is_streaming=True)
    assert whole.error == streamed.error == ""
    assert len(whole.text) > NUM_TOKENS and whole.text == streamed.text


def test_keys_limits_and_watchers_work_through_the_proxy_of_ray(service: RayService, client: openai.OpenAI) -> None:
    assert httpx.get(f"{service.url}/v1/models").json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{service.url}/health").json()["phase"] == httpx.get(f"{service.url}/ready").json()["phase"]
    assert "glint:num_requests_running" in httpx.get(f"{service.url}/metrics", headers={"x-api-key": KEY}).text
    with pytest.raises(openai.BadRequestError, match="nonsense"):
        client.post("/chat/completions", body={"messages": [], "nonsense": 1}, cast_to=httpx.Response)


def test_a_client_that_leaves_ends_its_request_with_that_outcome(service: RayService, client: openai.OpenAI) -> None:
    stream = Caller(client).send(QUESTION, 2000, stream=True)
    first = next(iter(stream))
    stream.close()

    def outcomes() -> list[tuple[str, str]]:
        lines = [line for pid in service.replicas() for line in service.outcomes(pid)]
        return [(line["outcome"], line["reason"]) for line in lines if line["request_id"] == first.id]

    wait_for("the outcome of the request whose client left", outcomes)
    assert outcomes() == [("cancelled", "client_left")]


def converse(caller: Caller, number: int) -> list[Ended]:
    """One of several clients: its requests one after the other, streaming and not in turn."""
    return [caller.ask(is_streaming=(number + turn) % 2 == 0) for turn in range(REQUESTS_PER_CLIENT)]


def check_both_answer(service: RayService, caller: Caller) -> None:
    """Send requests until each of two replicas has ended one of them in a whole answer."""
    wait_for("two replicas", lambda: len(service.replicas()) == 2)
    ids: set[str] = set()

    def have_answered() -> bool:
        with ThreadPoolExecutor(4) as pool:
            asked = [pool.submit(caller.ask, is_streaming=False, num_tokens=2) for _ in range(4)]
        ended = [future.result() for future in asked]
        assert [one.error for one in ended] == [""] * 4
        ids.update(one.request_id for one in ended)
        return all(ids & {line["request_id"] for line in service.outcomes(pid)} for pid in service.replicas())

    wait_for("an answer of each replica", have_answered)


def test_a_replica_killed_under_load_is_replaced_and_no_request_is_lost(
    service: RayService, client: openai.OpenAI
) -> None:
    caller = Caller(client)
    check_both_answer(service, caller)
    before = service.replicas()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        talking = [pool.submit(converse, caller, number) for number in range(NUM_CLIENTS)]
        for _ in range(NUM_CLIENTS // 2):
            assert caller.begun.acquire(timeout=PATIENCE_SECONDS)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        killed_at = time.monotonic()
    ended = [one for conversation in talking for one in conversation.result()]
    answered = [one for one in ended if not one.error]
    failed = [one for one in ended if one.error]
    print(f"{len(answered)} of {len(ended)} were answered; the others:", *(one.error for one in failed), sep="\n")
    assert len(ended) == NUM_CLIENTS * REQUESTS_PER_CLIENT
    assert 1 <= len(failed) < NUM_CLIENTS
    assert all(one.began_at < killed_at + NOTICE_SECONDS for one in failed)
    assert len({one.text for one in answered}) == 1

    wait_for("two replicas", lambda: len(service.replicas()) == 2)
    assert victim not in service.replicas()
    lines = [line for pid in before | service.replicas() for line in service.outcomes(pid)]
    finished = sorted(line["request_id"] for line in lines if line["outcome"] == "length")
    assert [finished.count(one.request_id) for one in answered] == [1] * len(answered)
    check_both_answer(service, caller)


def test_an_update_under_load_loses_nothing(
    service: RayService, client: openai.OpenAI, sample_model: Path, key_file: Path
) -> None:
    caller = Caller(client)
    before = service.replicas()
    is_updated = threading.Event()

    def converse_until_updated() -> list[Ended]:
        ended = []
        while not is_updated.is_set():
            ended.append(caller.ask(is_streaming=True))
        return ended

    with ThreadPoolExecutor(2) as pool:
        talking = [pool.submit(converse_until_updated) for _ in range(2)]
        try:
            service.run("deploy.ray_app:app", "replicas=2", f"model={sample_model}", f"api_key_file={key_file}")
        finally:
            is_updated.set()
    errors = [one.error for conversation in talking for one in conversation.result()]
    assert errors and not any(errors)
    wait_for("two replicas, both new", lambda: len(service.replicas() - before) == len(service.replicas()) == 2)


def test_requests_of_a_session_stay_together_where_asked(
    service: RayService, client: openai.OpenAI, sample_model: Path, key_file: Path
) -> None:
    service.delete()
    places = ("--app-dir", "deploy", "--working-dir", "deploy", "ray_app:app")
    service.run(*places, "replicas=2", f"model={sample_model}", f"api_key_file={key_file}", "routing=session")
    caller = Caller(client)
    first = [cached_tokens(caller, number) for number in range(NUM_SESSIONS)]
    second = [cached_tokens(caller, number) for number in range(NUM_SESSIONS)]
    assert max(first) < min(second)
    assert all(len(service.outcomes(pid)) > 0 for pid in service.replicas())


def cached_tokens(caller: Caller, number: int) -> int:
    """The tokens of a session's prompt that its replica still had; every session has a prompt of its own."""
    question = f"{number} is the number of this conversation, and everything in it is about that number. " * 4
    answer = caller.send(question, 1, session=f"session-{number}")
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_a_replica_whose_engine_fails_ends_at_once_and_draws_no_requests(
    service: RayService, client: openai.OpenAI, sample_model: Path, key_file: Path
) -> None:
    """Every engine of this test build fails at the same step: the long request brings one replica there."""
    service.delete()
    fault = json.dumps({"env_vars": {"GLINT_FAULT": f"step:0:{FAULTY_STEP}"}})
    words = ("replicas=2", f"model={sample_model}", f"api_key_file={key_file}", f"flags=--engine {TEST_LIBRARY}")
    service.run("--runtime-env-json", fault, "deploy.ray_app:app", *words)
    caller = Caller(client)
    check_both_answer(service, caller)
    before = service.replicas()
    failed = caller.ask(is_streaming=False, num_tokens=2 * FAULTY_STEP)
    failed_at = time.monotonic()
    assert "the engine failed" in failed.error and "InternalServerError" in failed.error
    later: list[Ended] = []
    while time.monotonic() < failed_at + END_SECONDS or len(later) < REQUESTS_AFTER_A_FAILURE:
        later.append(caller.ask(is_streaming=False, num_tokens=1))
        time.sleep(0.05)
    assert len(before & service.replicas()) == 1
    refused = [one.error for one in later if one.error]
    assert len(refused) < len(later) / 2, refused
    wait_for("a new replica", lambda: len(service.replicas()) == 2)
