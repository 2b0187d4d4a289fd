"""Thousands of valid and broken requests to every route of a real server: none harms it or another request."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.raw_http import wait_for
from tests.e2e.served import Served, served
from tests.e2e.small_glm import write_small_glm
from tests.fuzz.bodies import MODEL
from tests.fuzz.fuzz_routes import Tally, fuzz
from tests.fuzz.hostile import PATTERNS, SCHEMAS
from tests.fuzz.routes import BODIES, make_cases

NUM_CASES = 4000
SEED = int(os.environ.get("GLINT_FUZZ_SEED", "1"))
GENERATING = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a small GLM model, whose answers end soon whatever a body asks for."""
    folder = tmp_path_factory.mktemp("fuzzed")
    model = write_small_glm(folder / "model")
    flags = ("--model", str(model), "--served-model-name", MODEL, "--max-model-len", "256")
    with served(folder / "server.log", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def tally(fuzzed: Served) -> Tally:
    """What all cases gave."""
    print(f"seed {SEED}: replay with python -m tests.fuzz.fuzz_routes --seed {SEED} --cases {NUM_CASES} --url URL")
    return fuzz(fuzzed.url, make_cases(NUM_CASES, SEED))


def test_no_answer_is_wrong(tally: Tally) -> None:
    assert not tally.problems, "\n".join(tally.problems[:20])
    assert tally.statuses.total() >= 2000


def test_every_route_serves_some_and_refuses_some(tally: Tally) -> None:
    for route in BODIES:
        assert tally.statuses[f"{route} 200"] >= 5, tally.statuses
        assert tally.statuses[f"{route} 400"] >= 5, tally.statuses


def test_every_request_leaves_one_line_and_no_page(fuzzed: Served, tally: Tally) -> None:
    stats: dict[str, Any] = fuzzed.wait_idle()
    pages = stats["pages"]
    assert pages["held"] == 0
    assert pages["free"] + pages["cached"] == int(stats["cache_config"]["num_pages"])
    told = Counter(tally.request_ids)
    wait_for(lambda: told.keys() <= {line["request_id"] for line in fuzzed.outcome_lines()}, "every request has a line")
    written = Counter(line["request_id"] for line in fuzzed.outcome_lines())
    assert max(told.values()) == 1
    assert [request_id for request_id, count in written.items() if count != 1] == []
    assert "lost" not in {line["reason"] for line in fuzzed.outcome_lines()}
    references = 2
    assert len(written) <= len(told) + tally.missing_ids + references


def test_the_process_lives_and_logs_no_traceback(fuzzed: Served, tally: Tally) -> None:
    assert fuzzed.process.poll() is None
    assert httpx.get(f"{fuzzed.url}/health", timeout=30).json()["status"] == "ok"
    assert "Traceback" not in fuzzed.log.read_text()


@pytest.mark.parametrize("index", range(len(PATTERNS)))
def test_hostile_patterns_are_served_or_refused(fuzzed: Served, index: int) -> None:
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"regex": PATTERNS[index]}}
    answer = httpx.post(f"{fuzzed.url}/generate", json=body, timeout=60)
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_hostile_schemas_are_served_or_refused(fuzzed: Served, index: int) -> None:
    body = {"prompt": "a", "max_tokens": 2, "structured_outputs": {"json": SCHEMAS[index]}}
    answer = httpx.post(f"{fuzzed.url}/generate", json=body, timeout=60)
    assert answer.status_code in (200, 400), answer.text
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMAS[index]}}
    messages = [{"role": "user", "content": "a"}]
    body = {"messages": messages, "max_tokens": 2, "tools": [tool], "tool_choice": "required", "enable_thinking": False}
    answer = httpx.post(f"{fuzzed.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("path", GENERATING)
def test_a_client_that_leaves_at_any_byte_harms_nothing(fuzzed: Served, path: str) -> None:
    texts = {"/generate": "prompt", "/v1/completions": "prompt", "/v1/responses": "input"}
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    text: Any = "Hello?" if path in texts else [{"role": "user", "content": "Hello?"}]
    body = {"model": MODEL, texts.get(path, "messages"): text, limit: 200, "stream": True}
    ids = set()
    for size in range(0, 400, 40):
        with httpx.stream("POST", fuzzed.url + path, json=body, timeout=60) as answer:
            assert answer.status_code == 200
            ids.add(answer.headers.get("x-request-id") or answer.headers["request-id"])
            received = 0
            for chunk in answer.iter_raw():
                received += len(chunk)
                if received >= size:
                    break
    stats: dict[str, Any] = fuzzed.wait_idle()
    assert stats["pages"]["held"] == 0
    assert len(ids) == 10

    def counted() -> list[int]:
        lines = Counter(line["request_id"] for line in fuzzed.outcome_lines())
        return [lines[request_id] for request_id in ids]

    wait_for(lambda: all(counted()), "each stream has its line")
    assert counted() == [1] * 10
