"""The CPU bench on a small model: every batch is timed over the steps asked for, also the shortest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glint import cli
from glint.bench import cpu
from glint.checkpoint.table import open_checkpoint
from glint.engine.args import EngineArgs
from glint.engine.engine import Engine
from glint.errors import EngineError
from tests.cpu.sweeps import slow
from tests.e2e.small_glm import write_small_glm
from tests.reference.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "air", "air", "bf16")


@pytest.mark.parametrize(("prompt_tokens", "decode_tokens"), [(3, 9), *slow((1, 2), (200, 3))])
def test_every_batch_is_timed_over_the_steps_asked_for(
    folder: Path, prompt_tokens: int, decode_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[int] = []
    original = cpu.timed_step

    def count_step(engine: Engine, batch: int) -> float:
        timed.append(batch)
        return original(engine, batch)

    monkeypatch.setattr(cpu, "timed_step", count_step)
    checkpoint = open_checkpoint(folder)
    settings = cpu.bench_settings(folder, checkpoint.config, prompt_tokens, decode_tokens, EngineArgs(threads=1))
    with Engine(checkpoint, settings, None) as engine:
        ceilings = cpu.measure_ceilings(engine)
        assert cpu.measure_prefill(engine, checkpoint, prompt_tokens, ceilings).tokens_per_second > 0
        for batch in cpu.BATCHES:
            row = cpu.measure_decode(engine, checkpoint, batch, decode_tokens, ceilings)
            assert row.tokens_per_second > 0 and not engine.has_work
    assert timed == [batch for batch in cpu.BATCHES for _ in range(decode_tokens)]


def test_a_step_that_moves_too_few_requests_is_an_error(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    with Engine(checkpoint, cpu.bench_settings(folder, checkpoint.config, 1, 2, EngineArgs(threads=1)), None) as engine:
        engine.submit([1], cpu.greedy(2))
        with pytest.raises(EngineError, match="1 tokens to 2 requests"):
            cpu.timed_step(engine, 2)


def test_the_command_prints_a_table_and_writes_json(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    sizes = ["--prompt-tokens", "1", "--decode-tokens", "2", "--row-slices", "2", "--expert-layout", "ep"]
    assert cli.main(["bench", "cpu", "--model", str(folder), "--json", str(file), "--threads", "2", *sizes]) == 0
    assert "decode, 32 at once" in capsys.readouterr().out
    assert len(json.loads(file.read_text())["rows"]) == 1 + len(cpu.BATCHES)


@pytest.mark.parametrize("drafts", ["0", "auto", "2"])
def test_speculation_is_measured_beside_its_absence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], drafts: str
) -> None:
    folder, file = write_small_glm(tmp_path / "model", "without copies"), tmp_path / "figures.json"
    sizes = ["--prompt-tokens", "4", "--decode-tokens", "12", "--threads", "1", "--num-speculative-tokens", drafts]
    assert cli.main(["bench", "cpu", "--model", str(folder), "--json", str(file), *sizes]) == 0
    rows = json.loads(file.read_text())["speculation"]
    assert ("speculation, " in capsys.readouterr().out) == (drafts != "0") == bool(rows)
    assert [row["batch"] for row in rows] == ([] if drafts == "0" else [1, 8, 32])
    assert all(row["plain_tokens_per_second"] > 0 and row["tokens_per_second"] > 0 for row in rows)
    assert drafts != "2" or all(row["draft_tokens"] >= 3 * 24 * row["batch"] for row in rows)
