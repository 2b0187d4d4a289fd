"""A server whose model is shared by three ranks: the answers of one rank, and what happens when a rank fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.served import ROOT, Served, free_port, served, start

TEST_LIBRARY = os.environ.get("GLINT_TEST_LIBRARY") or str(ROOT / "build" / "libglint_cpu_test.so")
RANKS = ("--tp", "3")
PROMPTS = ("The capital of France is", "Once upon a time, in a small village by the sea, there lived " * 8)
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "top_p": 0.95}
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
END_SECONDS = 5.0
WITHOUT_END = """
import asyncio, sys
from glint.server.service import EngineService
async def hang(self):
    await asyncio.sleep(600)
EngineService.close = hang
from glint.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Served]]:
    """The same model on one rank and on three, with rows cut into the same slices."""
    folder = tmp_path_factory.mktemp("ranks")
    with (
        served(folder / "one.log", "--tp", "1", "--row-slices", "3") as one,
        served(folder / "three.log", *RANKS, "--threads", "2") as three,
    ):
        yield one, three


def client_of(server: Served) -> openai.OpenAI:
    """The official client; a request that fails is not tried again."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=180)


def test_token_by_token(servers: tuple[Served, Served]) -> None:
    bodies = [{"prompt": prompt, "max_tokens": 30, "ignore_eos": True} | SEEDED | {"n": 2} for prompt in PROMPTS]
    for body in bodies:
        alone, shared = (
            httpx.post(f"{server.url}/generate", json=body, timeout=180).json()["choices"] for server in servers
        )
        assert [choice["token_ids"] for choice in shared] == [choice["token_ids"] for choice in alone]
        assert all(len(choice["token_ids"]) == 30 for choice in alone)


def faulty(fault: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """The flags of a server on the test build, and the change of the environment that makes one of its ranks fail.

    The server is one process without a supervisor.
    """
    return (*RANKS, "--engine", TEST_LIBRARY, "--max-num-seqs", "4", "--no-restart"), {"GLINT_FAULT": fault}


def test_a_rank_that_fails_at_load_is_a_clear_error() -> None:
    flags, environment = faulty("load:1:1")
    command = [sys.executable, "-m", "glint", "serve", "--port", str(free_port()), *flags]
    changed = os.environ | environment
    ended = subprocess.run(command, cwd=ROOT, env=changed, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert "rank 1 of 3 failed: the fault that $GLINT_FAULT=load:1:1 asks for" in ended.stderr
    assert "ready:" not in ended.stderr


def ask(client: openai.OpenAI, model: str, index: int) -> str:
    """Send a request, the first a short one and half of them streamed; "whole" or what the client is told instead."""
    num_tokens = 2 if index == 0 else LONG["max_tokens"]
    asked: dict[str, Any] = {"model": model, "prompt": LONG["prompt"], "max_tokens": num_tokens}
    try:
        answer: Any = client.completions.create(**asked, stream=index % 2 == 0, extra_body={"ignore_eos": True})
        choices = [part.choices[0] for part in (answer if index % 2 == 0 else [answer])]
    except openai.APIError as problem:
        return str(problem)
    assert choices[-1].finish_reason == "length"
    return "whole"


@pytest.mark.parametrize("fault", ["step:1:75", "collective:2:4500"], ids=["step", "collective"])
def test_a_rank_that_fails_under_load(tmp_path: Path, fault: str) -> None:
    flags, environment = faulty(fault)
    rank = fault.split(":")[1]
    server = start(tmp_path / "server.log", *flags, environment=environment)
    try:
        with ThreadPoolExecutor(8) as threads, client_of(server) as client:
            model = server.model
            asked = [threads.submit(ask, client, model, index) for index in range(8)]
            first_failure(asked)
            failed_at = time.monotonic()
            watch(server, rank)
            assert server.process.wait(END_SECONDS) == 1
            assert time.monotonic() - failed_at < END_SECONDS
            endings = [one.result(END_SECONDS) for one in asked]
    finally:
        server.process.kill()
        server.process.wait()
    assert endings[0] == "whole" or f"rank {rank} of 3 failed" in endings[0]
    for ending in endings[1:]:
        assert f"rank {rank} of 3 failed" in ending, endings
    lines = server.outcome_lines()
    assert len(lines) == len({line["request_id"] for line in lines}) == 8
    reasons = sorted((line["outcome"], line["reason"]) for line in lines)
    assert reasons[:7] == [("failed", "engine_failed")] * 7
    assert reasons[7] == (("length", "length") if endings[0] == "whole" else ("failed", "engine_failed"))
    again(tmp_path / "again.log", server.port, flags)


def first_failure(asked: list[Future[str]]) -> None:
    """Wait until a request has been told of the failure."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if any(one.done() and one.result() != "whole" for one in asked):
            return
        time.sleep(0.01)
    raise AssertionError("no rank has failed")


def watch(server: Served, rank: str) -> None:
    """A server whose rank failed says so to those who watch it and to new requests, for as long as it answers."""
    try:
        for path in ("/health", "/ready"):
            report = httpx.get(f"{server.url}{path}", timeout=END_SECONDS)
            assert report.status_code == 503 and report.json()["status"] == "unhealthy"
            assert f"rank {rank} of 3 failed" in report.json()["reason"]
        refused = httpx.post(f"{server.url}/generate", json=LONG, timeout=END_SECONDS)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_failed"
    except httpx.TransportError:
        return


def again(log: Path, port: int, flags: tuple[str, ...]) -> None:
    """The same command without the fault starts on the same port and answers."""
    server = start(log, *flags, port=port)
    try:
        answer = httpx.post(f"{server.url}/generate", json=LONG | {"max_tokens": 5}, timeout=180)
        assert len(answer.json()["choices"][0]["token_ids"]) == 5
        assert server.stop() == 0
    finally:
        server.process.kill()
        server.process.wait()


def test_what_hangs_after_a_failure_is_given_up() -> None:
    """The warm-up fails and the engine is never freed; the process ends all the same."""
    flags, environment = faulty("step:2:1")
    command = [sys.executable, "-c", WITHOUT_END, "serve", "--port", str(free_port()), *flags]
    changed = os.environ | environment
    failed_at = 0.0
    with subprocess.Popen(command, cwd=ROOT, env=changed, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "rank 2 of 3 failed" in line and not failed_at:
                    failed_at = time.monotonic()
            assert process.wait(END_SECONDS) == 1
            assert failed_at and time.monotonic() - failed_at < END_SECONDS
            assert "the server does not end after its failure; the process ends without waiting for it" in line
        finally:
            process.kill()


def test_ranks_that_a_model_cannot_have_are_refused_with_all_reasons() -> None:
    command = [sys.executable, "-m", "glint", "serve", "--port", str(free_port()), "--tp", "2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    for reason in ("num_attention_heads 9 cannot be split over 2", "num_key_value_heads 3 can neither be split over 2"):
        assert reason in ended.stderr
