"""The CPU bench: what it counts, what it prints, and what it says when the peer is not there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from glint.bench import llama_peer
from glint.bench.cpu import Report, Row, render, touched_bytes
from glint.bench.llama_peer import PeerFigures
from glint.checkpoint.layout import Role
from glint.checkpoint.table import open_checkpoint
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


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed here")
@pytest.mark.parametrize("python", [None, "/no/such/interpreter"])
def test_missing_peer_says_what_to_install(python: str | None) -> None:
    figures, problem = llama_peer.run_program(python, {"gguf": "none"})
    assert figures is None
    assert problem is not None
    assert ("llama" in problem and "--peer-python" in problem) if python is None else python in problem
