"""The rank bench with drafts on small engines of the CPU: every step makes and verifies them, two in flight."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from glint.bench.rank import RankBench
from glint.bench.rank_report import DecodeRow
from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.cli import main
from glint.engine.settings import EngineSettings
from glint.errors import EngineError
from glint.native import abi
from glint.native.library import NativeEngine
from tests.cpu.small_engine import SMALL_SHAPE, open_engine
from tests.cpu.speculation import VOCAB_SIZE
from tests.reference.checkpoints import make_checkpoint

PLAIN = DecodeRow(3, 40, 40.0, 1.5, 1.5, 1.5, 2.0, 7, 0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A model of four tokens, whose random MTP layer is often right."""
    folder = tmp_path_factory.mktemp("rank") / "model"
    return open_checkpoint(
        make_checkpoint(folder, "glm47", "fp8_channel", mtp="with copies", **SMALL_SHAPE | {"vocab_size": VOCAB_SIZE})
    )


class Recorder:
    """Keeps what is submitted to an engine, and how many steps were in flight before."""

    def __init__(self, engine: NativeEngine) -> None:
        self.steps: list[tuple[list[int], list[int], int]] = []
        self._engine = engine
        self._submit = engine.submit_step

    def submit(self, items: Sequence[tuple[int, int]], drafts: Sequence[int] = ()) -> abi.Ticket:
        """Submit and remember."""
        in_flight = self._engine.stats().steps_in_flight
        self.steps.append(([advance for _, advance in items], list(drafts), in_flight))
        return self._submit(items, drafts)


def test_every_step_verifies_and_makes_drafts(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(checkpoint, max_step_tokens=48, max_step_items=9, max_draft_tokens=2) as engine:
        recorder = Recorder(engine)
        monkeypatch.setattr(engine, "submit_step", recorder.submit)
        row = RankBench(engine, VOCAB_SIZE, 48).measure_speculation(PLAIN, warm_up=4, num_drafts=2)
        stats = engine.stats()
        engine.check()
    fill, steps = recorder.steps[:3], recorder.steps[3:]
    assert [advances for advances, *_ in fill] == [[40, 8], [32, 16], [24]]
    assert all(drafts == [2] * len(advances) for advances, drafts, _ in recorder.steps)
    assert [in_flight for *_, in_flight in recorder.steps] == [0] * 3 + [0, *[1] * 3] + [0, *[1] * 7]
    assert [advances for advances, *_ in steps] == [[3, 3, 3]] * (4 + 7 + 1)
    assert stats.tokens_sampled > 3 * (1 + 12)
    assert (stats.num_requests, stats.pages_held, stats.steps_in_flight) == (0, 0, 0)
    assert (row.batch, row.context, row.rows_verified, row.steps_timed, row.plain_ms) == (3, 40, 9, 7, 1.5)
    assert 0 < row.p10_ms <= row.median_ms <= row.p90_ms


def test_steps_with_too_few_drafts_are_refused(checkpoint: Checkpoint) -> None:
    with open_engine(checkpoint, max_draft_tokens=2) as engine:
        bench = RankBench(engine, VOCAB_SIZE, 64)
        request = bench._add(30, 2)
        with pytest.raises(EngineError, match="made 0 to 0 drafts for each instead of 2"):
            bench._fill([request], 30, 2)


def test_the_whole_command(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[tuple[int, bool]] = []

    def open_rank(chosen: Any, shape: Any, settings: EngineSettings, shards_rows: bool = False) -> NativeEngine:
        opened.append((settings.num_speculative_tokens, shards_rows))
        sizes = {"max_step_items": settings.max_num_seqs * (1 + settings.num_speculative_tokens)}
        return open_engine(checkpoint, max_draft_tokens=settings.num_speculative_tokens, **sizes)

    monkeypatch.setattr("glint.bench.rank.open_rank", open_rank)
    monkeypatch.setattr("glint.bench.rank.fit_rows", lambda chosen, shape: ([(1, 20), (3, 20)], ()))
    flags = ["--model", str(checkpoint.folder), "--tp", "1", "--prefill", "16", "--steps", "5", "--warm-up", "2"]
    drafts = ["--speculative", "2", "--acceptance", "0.75,0.25", "--json", str(tmp_path / "rank.json")]
    assert main(["bench", "rank", *flags, *drafts]) == 0
    assert opened == [(0, False), (2, False), (0, True)]
    printed = capsys.readouterr().out
    assert "acceptance: given, not measured: 0.75, 0.25" in printed
    document = json.loads((tmp_path / "rank.json").read_text())
    found = document["speculation"]
    assert [(row["batch"], row["rows_verified"]) for row in found["rows"]] == [(1, 3), (3, 9)]
    for plain, row in zip(document["decode"], found["rows"], strict=True):
        assert row["plain_ms"] == plain["median_ms"]
        assert row["gain_by_given_acceptance"] == pytest.approx(2.0 * plain["median_ms"] / row["median_ms"])
