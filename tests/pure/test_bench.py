"""The CPU bench: what it counts, what it prints, and what it says when the peer is not there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from glint.bench import llama_peer
from glint.bench.cpu import Report, Row, render, touched_bytes
from glint.bench.llama_peer import PeerFigures
from glint.bench.machine import check_writable
from glint.checkpoint.layout import Role
from glint.checkpoint.table import open_checkpoint
from glint.errors import CheckpointError, RequestError
from tests.reference.checkpoints import make_checkpoint


def report(peer: PeerFigures | None, problem: str | None) -> Report:
    rows = (Row("prefill, 512 tokens", 200.0, None), Row("decode, 1 at once", 50.0, 8e9))
    return Report("folder", "processor", "plain", 2, 16e9, rows, peer, problem)


def test_all_experts_at_a_large_batch_and_the_routed_share_at_one(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "model", "glm47", "fp8_channel"))
    config = checkpoint.config
    kept = [entry for entry in checkpoint.tensors if entry.role != Role.EMBEDDING]
    routed = sum(entry.byte_count for entry in kept if entry.expert is not None)
    rest = sum(entry.byte_count for entry in kept) - routed
    assert routed > 0
    assert touched_bytes(checkpoint.tensors, config, 100_000) == rest + routed
    share = config.experts_per_token / config.num_experts
    assert touched_bytes(checkpoint.tensors, config, 1) == pytest.approx(rest + routed * share, abs=1)


def test_table_shows_units_share_and_ratio() -> None:
    text = render(report(PeerFigures("what ran", (100.0, 40.0)), None))
    prefill, decode = (line.split() for line in text.splitlines() if line.startswith(("prefill", "decode")))
    assert prefill[-5:] == ["200.0", "-", "-", "100.0", "2.00x"]
    assert decode[-5:] == ["50.0", "8.0", "50%", "40.0", "1.25x"]
    assert "16.0 GB/s" in text and "what ran" in text


def test_peer_that_did_not_run_is_not_measured() -> None:
    text = render(report(None, "no such package"))
    assert "not measured: no such package" in text
    assert all(line.split()[-2:] == ["-", "-"] for line in text.splitlines() if line.startswith(("prefill", "decode")))


@pytest.mark.parametrize(
    "text",
    ["", "hello", "[1]", "7", '{"description": "x"}', '{"description": "x", "tokens_per_second": [1.0]}'],
)
def test_a_peer_that_answers_something_else_is_not_measured(text: str, tmp_path: Path) -> None:
    program = tmp_path / "peer"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{text}'\n")
    program.chmod(0o755)
    figures, problem = llama_peer.run_program(str(program), {"batches": [1]})
    assert figures is None
    assert problem is not None and str(program) in problem and "no figures" in problem


def test_figures_are_those_of_the_last_line() -> None:
    text = 'noise\n{"description": "what ran", "tokens_per_second": [1, 2.5]}\n'
    assert llama_peer.read_figures(text, 2) == PeerFigures("what ran", (1.0, 2.5))


@pytest.mark.parametrize("problem", [CheckpointError("no wheel"), OSError("no space")])
def test_a_peer_model_that_cannot_be_had_is_not_measured(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> Path:
        raise problem

    monkeypatch.setattr(llama_peer, "find_wheel", refuse)
    assert llama_peer.measure_llama(None, 1, 1, 2, (1,)) == (None, str(problem))


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "figures.json"):
        with pytest.raises(RequestError, match=f"--json {path} cannot be written"):
            check_writable(path)
    kept = tmp_path / "kept.json"
    kept.write_text("before")
    check_writable(kept)
    check_writable(tmp_path / "new.json")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed here")
@pytest.mark.parametrize("python", [None, "/no/such/interpreter"])
def test_missing_peer_says_what_to_install(python: str | None) -> None:
    figures, problem = llama_peer.run_program(python, {"gguf": "none", "batches": [1]})
    assert figures is None
    assert problem is not None
    assert ("llama" in problem and "--peer-python" in problem) if python is None else python in problem
