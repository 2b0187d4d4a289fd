"""Three ranks from Python and from the command line: the answers of one rank, the failure of one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from glint.errors import RankFailed
from glint.llm import LLM
from glint.sample.model import make_sample_model
from glint.sampling import SamplingParams
from tests.cpu.testing_library import declare
from tests.e2e.served import ROOT

PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea, there lived " * 8]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, logprobs=3, prompt_logprobs=1),
    SamplingParams(max_tokens=24, temperature=1.0, seed=5, logprobs=3, n=2),
]
TEST_LIBRARY = os.environ.get("GLINT_TEST_LIBRARY") or str(ROOT / "build" / "libglint_cpu_test.so")


@pytest.fixture(scope="module")
def folder() -> Path:
    """The sample model: 9 heads, 3 key/value heads."""
    return make_sample_model()


def answers(folder: Path, **options: Any) -> list[Any]:
    """Everything that comes back for the prompts, log-probabilities to the last bit."""
    with LLM(folder, **options) as llm:
        return llm.generate(PROMPTS, sampling_params=PARAMS)


def test_three_ranks_answer_as_one(folder: Path) -> None:
    alone = answers(folder, row_slices=3)
    for options in ({}, {"threads": 1, "sequence_parallel": "on"}, {"sequence_parallel": "off", "max_step_tokens": 24}):
        assert answers(folder, tp=3, **options) == alone, options


def test_a_failed_rank_ends_an_engine_and_a_new_one_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reset = declare("glint_testing_reset_faults", None)
    monkeypatch.setenv("GLINT_FAULT", "step:2:5")
    reset()
    with LLM(folder, tp=3, engine=TEST_LIBRARY) as llm:
        for _ in range(2):
            with pytest.raises(RankFailed, match=r"rank 2 of 3 failed: .* the ranks cannot go on without it"):
                llm.generate(PROMPTS, sampling_params=PARAMS)
            assert not llm.engine.has_work
    monkeypatch.delenv("GLINT_FAULT")
    assert answers(folder, tp=3, engine=TEST_LIBRARY) == answers(folder, tp=3)


def run_glint(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a glint command to its end."""
    command = [sys.executable, "-m", "glint", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_the_smoke_check_on_three_ranks(folder: Path) -> None:
    ended = run_glint("smoke", "--model", str(folder), "--tp", "3", "--threads", "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "smoke: all is well" in ended.stdout and "3 ranks with row_slices 3" in ended.stdout


def test_a_bench_of_a_server_on_three_ranks(folder: Path, tmp_path: Path) -> None:
    load = ("--concurrency", "2", "--num-prompts", "4", "--prompt-len", "16", "--gen-len", "8")
    figures = tmp_path / "figures.json"
    flags = ("--model", str(folder), "--tp", "3", "--sequence-parallel", "on", "--json", str(figures))
    ended = run_glint("bench", "serve", *load, *flags)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads(figures.read_text())
    assert (report["completed"], report["failed"], report["total_output_tokens"]) == (4, 0, 32)
