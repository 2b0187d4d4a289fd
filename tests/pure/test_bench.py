"""The CPU bench: what it counts, what it prints, and what it says when the peer is not there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from glint.bench import llama_peer
from glint.bench.cpu import (
    Ceilings,
    Report,
    Turn,
    Work,
    make_row,
    median_of,
    peer_ratios,
    render,
    step_work,
    touched_bytes,
)
from glint.bench.llama_peer import LlamaPeer, PeerFigures, PeerTurn
from glint.bench.machine import check_writable
from glint.checkpoint.layout import Role
from glint.checkpoint.table import open_checkpoint
from glint.engine.settings import token_cache_bytes
from glint.errors import CheckpointError, RequestError
from tests.reference.checkpoints import make_checkpoint


def turn(slowness: float = 1.0) -> Turn:
    ceilings = Ceilings(16e9, 40e9, 5e9)
    rows = (
        make_row("prefill, 512 tokens", 512, 2.56 * slowness, Work(1e9, 25.6e9, 1e9), ceilings),
        make_row("decode, 1 at once", 1, 0.02 * slowness, Work(160e6, 60e6, 50e6), ceilings),
    )
    return Turn(ceilings, rows)


def report(peer: PeerFigures | None, problem: str | None) -> Report:
    ratios = None if peer is None else peer_ratios([turn()], peer)
    return Report("folder", "processor", "plain", 2, turn().ceilings, turn().rows, peer, problem, ratios)


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
    text = render(report(PeerFigures("what ran", ((100.0, 40.0),)), None))
    prefill, decode = (line.split() for line in text.splitlines() if line.startswith(("prefill", "decode")))
    assert prefill[-7:] == ["200.0", "0.4", "10.0", "25%", "arithmetic", "100.0", "2.00x"]
    assert decode[-7:] == ["50.0", "8.0", "3.0", "51%", "decode", "40.0", "1.25x"]
    assert "16.0 GB/s" in text and "40.0 billion" in text and "5.0 billion" in text and "what ran" in text


def test_a_ratio_is_the_median_of_the_ratios_of_the_turns() -> None:
    turns = [turn(), turn(2.0), turn(4.0)]
    figures = PeerFigures("what ran", ((100.0, 40.0), (200.0, 10.0), (20.0, 5.0)))
    assert peer_ratios(turns, figures) == pytest.approx((2.0, 2.5))
    middle = median_of([one.rows[0] for one in turns])
    assert (middle.name, middle.limit) == ("prefill, 512 tokens", "arithmetic")
    assert (middle.tokens_per_second, middle.share) == pytest.approx((100.0, 0.125))


def test_a_row_of_the_peer_has_the_setting_with_the_higher_median() -> None:
    settings = [((5.0, 9.0), (4.0, 1.0)), ((1.0, 2.0), (3.0, 8.0)), ((2.0, 3.0), (9.0, 7.0))]
    figures = llama_peer.better_settings([PeerTurn("what ran", rows) for rows in settings])
    assert figures == PeerFigures("what ran", ((4.0, 1.0), (3.0, 8.0), (9.0, 7.0)))


def test_the_ceiling_that_asks_for_the_most_time_binds() -> None:
    ceilings = Ceilings(10.0, 100.0, 20.0)
    work = Work(read_bytes=40.0, multiply_adds=300.0, fp8_weights=90.0)
    assert ceilings.least_seconds(work, 2) == {"read": 4.0, "arithmetic": 3.0}
    assert ceilings.least_seconds(work, 1) == pytest.approx({"read": 4.0, "arithmetic": 3.0, "decode": 4.5 + 2.1})
    row = make_row("decode", 2, 8.0, work, ceilings)
    assert (row.tokens_per_second, row.limit, row.share) == (0.25, "read", 0.5)


@pytest.mark.parametrize("quantisation", ["bf16", "fp8_channel"])
def test_work_is_that_of_the_shapes(quantisation: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "model", "glm47", quantisation))
    config = checkpoint.config
    heads = config.num_heads * config.head_dim
    attention = config.hidden_size * (2 * heads + 2 * config.num_kv_heads * config.head_dim)
    dense = 3 * config.hidden_size * config.dense_width
    routed = 3 * config.hidden_size * config.expert_width
    shared = 3 * config.hidden_size * config.shared_width
    router = config.hidden_size * config.num_experts
    sparse_layers = config.num_layers - config.num_dense_layers
    layers = (
        config.num_layers * attention
        + config.num_dense_layers * dense
        + sparse_layers * (config.experts_per_token * routed + shared)
    )
    head = config.vocab_size * config.hidden_size
    work = step_work(checkpoint, 5, 2, 40, 30)
    scores_and_values = 2 * config.num_layers * heads * 40
    products = 5 * (layers + sparse_layers * router) + 2 * head
    assert work.multiply_adds == pytest.approx(products + scores_and_values)
    touched = touched_bytes(checkpoint.tensors, config, 5)
    assert work.read_bytes == touched + 30 * token_cache_bytes(config, "cpu")
    assert step_work(checkpoint, 1, 1, 0, 0).fp8_weights == (0 if quantisation == "bf16" else pytest.approx(layers))


def test_peer_that_did_not_run_is_not_measured() -> None:
    text = render(report(None, "no such package"))
    assert "not measured: no such package" in text
    assert all(line.split()[-2:] == ["-", "-"] for line in text.splitlines() if line.startswith(("prefill", "decode")))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "[1]",
        "7",
        '{"description": "x"}',
        '{"description": "x", "tokens_per_second": [1.0]}',
        '{"description": "x", "tokens_per_second": [[1.0, 2.0], [1.0]]}',
        '{"description": "x", "tokens_per_second": []}',
    ],
)
def test_a_peer_that_answers_something_else_is_not_measured(text: str, tmp_path: Path) -> None:
    program = tmp_path / "peer"
    program.write_text(f"#!/bin/sh\nprintf '%s' '{text}'\n")
    program.chmod(0o755)
    figures, problem = llama_peer.run_program(str(program), {"batches": [1]})
    assert figures is None
    assert problem is not None and str(program) in problem and "no figures" in problem


def test_figures_are_those_of_the_last_line() -> None:
    text = 'noise\n{"description": "what ran", "tokens_per_second": [[1, 2.5], [3, 4]]}\n'
    assert llama_peer.read_figures(text, 2) == PeerTurn("what ran", ((1.0, 2.5), (3.0, 4.0)))


@pytest.mark.parametrize("problem", [CheckpointError("no wheel"), OSError("no space")])
def test_a_peer_model_that_cannot_be_had_is_not_measured(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> Path:
        raise problem

    monkeypatch.setattr(llama_peer, "find_wheel", refuse)
    with LlamaPeer(None, 1, 1, 2, (1,)) as peer:
        peer.measure_turn()
        assert peer.figures() is None and peer.problem == str(problem)


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
