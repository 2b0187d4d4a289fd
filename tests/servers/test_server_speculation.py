"""A served model with an MTP layer: the same answers with drafts as without, and figures that tell of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.raw_http import pages_of, wait_for
from tests.e2e.served import served
from tests.e2e.small_glm import write_small_glm

BODY: dict[str, Any] = {
    "model": "glm",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 60,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_glm(tmp_path_factory.mktemp("model") / "glm", "without copies")


def test_answers_are_the_same_and_the_figures_tell_of_drafts(folder: Path, tmp_path: Path) -> None:
    found = []
    for flags in (("--num-speculative-tokens", "0"), ("--speculative-num-steps", "3"), ()):
        log = tmp_path / "server.log"
        fixed = ("--model", str(folder), "--served-model-name", "glm", "--threads", "1", "--max-model-len", "256")
        with served(log, *fixed, *flags) as server:
            letter = httpx.post(f"{server.url}/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()
            body = BODY | {"logit_bias": {str(letter["tokens"][-1]): 100}}
            before = server.stats()
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
            metrics = httpx.get(f"{server.url}/metrics").text
            stats = server.stats()
        usage = answer["usage"]
        details = usage["completion_tokens_details"]
        samples = {
            sample.name: sample.value
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
            if "position" not in sample.labels
        }
        drafts, accepted = (samples[f"glint:spec_decode_num_{name}_tokens_total"] for name in ("draft", "accepted"))
        assert (drafts, accepted) == (stats["draft_tokens"], stats["accepted_draft_tokens"])
        assert sum(stats["accepted_draft_tokens_per_position"]) == accepted
        drafts, accepted = (stats[name] - before[name] for name in ("draft_tokens", "accepted_draft_tokens"))
        if flags[:1] == ("--num-speculative-tokens",):
            assert drafts == 0 and "accepted_prediction_tokens" not in details
        else:
            assert details["accepted_prediction_tokens"] == accepted > 20
            assert details["rejected_prediction_tokens"] == drafts - accepted
            assert f"draft_tokens={drafts} accepted_draft_tokens={accepted}" in log.read_text()
        found.append((answer["choices"], usage["completion_tokens"], usage["prompt_tokens"]))
    assert found[0] == found[1] == found[2] and found[0][1] == 60


def test_a_stop_string_inside_a_step_leaves_the_same_figures_everywhere(folder: Path, tmp_path: Path) -> None:
    """Drafts behind it are not part of the answer: in the usage, the log and the metrics they count as rejected."""
    log = tmp_path / "server.log"
    fixed = ("--model", str(folder), "--served-model-name", "glm", "--threads", "1", "--max-model-len", "256")
    with served(log, *fixed, "--num-speculative-tokens", "3") as server:
        letter = httpx.post(f"{server.url}/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()
        body = BODY | {"logit_bias": {str(letter["tokens"][-1]): 100}, "stop": "a" * 6}
        before = server.stats()
        usage = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
        stats = server.stats()
    details = usage["completion_tokens_details"]
    drafts, accepted = (stats[name] - before[name] for name in ("draft_tokens", "accepted_draft_tokens"))
    assert (usage["completion_tokens"], drafts, accepted) == (6, 6, 4)
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (4, 2)
    assert "draft_tokens=6 accepted_draft_tokens=4" in log.read_text()


async def load(url: str, asks: list[dict[str, Any]]) -> list[tuple[str, int] | None]:
    """The texts and tokens of streams that run at once; every fourth client leaves after a few events."""
    limits = httpx.Limits(max_connections=len(asks))
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:

        async def ask(number: int, body: dict[str, Any]) -> tuple[str, int] | None:
            pieces, tokens = [], 0
            async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    tokens = event["usage"]["completion_tokens"] if event.get("usage") else tokens
                    pieces += [json.dumps(choice["delta"]) for choice in event["choices"]]
                    if number % 4 == 3 and len(pieces) > number:
                        return None
            texts = [json.loads(piece) for piece in pieces]
            return "".join((one.get("reasoning_content") or "") + (one.get("content") or "") for one in texts), tokens

        return await asyncio.gather(*(ask(number, body) for number, body in enumerate(asks)))


def test_streams_at_once_in_few_pages_are_those_without_drafts(folder: Path, tmp_path: Path) -> None:
    """Under load with drafts nothing hangs or breaks, also where clients leave, and all pages come back."""
    asks = [
        BODY
        | {"messages": [{"role": "user", "content": f"{number} " * (number % 5 + 1)}], "logprobs": False}
        | {"temperature": number % 2, "seed": number, "max_tokens": 20 + number, "stream": True}
        | {"stream_options": {"include_usage": True}}
        for number in range(32)
    ]
    found = []
    for count in ("0", "3"):
        sizes = ("--max-num-seqs", "8", "--max-model-len", "256", "--max-total-tokens", "384", "--threads", "2")
        fixed = ("--model", str(folder), "--served-model-name", "glm", *sizes)
        with served(tmp_path / f"server{count}.log", *fixed, "--num-speculative-tokens", count) as server:
            found.append(asyncio.run(load(server.url, asks)))
            wait_for(lambda: pages_of(server)["held"] == 0, "all pages come back")
            drafts = server.stats()["draft_tokens"]
        assert (drafts > 0) == (count != "0")
    assert found[0] == found[1] and sum(answer is None for answer in found[0]) == 8
