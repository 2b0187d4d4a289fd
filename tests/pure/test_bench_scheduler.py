"""The scheduler bench: what it measures, what it prints and writes, and what it refuses."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from glint.bench.scheduler import add_flags, run, summarise
from glint.errors import RequestError


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(words)


def test_the_table_and_the_file_have_the_same_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert run(parse("--running", "1", "5", "--steps", "20", "--json", str(path))) == 0
    figures = json.loads(path.read_text())
    assert (figures["unit"], figures["steps"]) == ("microseconds", 20)
    assert [(row["running"], row["is_queued"]) for row in figures["rows"]] == [
        (1, False),
        (5, False),
        (1, True),
        (5, True),
    ]
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "decoding" in line]
    assert [line[0] for line in lines] == ["1", "5", "1", "5"]
    assert [line[-3:] for line in lines] == [
        [f"{row[name]:.1f}" for name in ("mean", "p50", "p99")] for row in figures["rows"]
    ]


def test_the_figures_are_those_of_numpy() -> None:
    values = np.random.default_rng(3).exponential(10.0, 1000)
    row = summarise(4, False, values.tolist())
    assert row.mean == pytest.approx(values.mean())
    assert row.p50 == pytest.approx(np.median(values))
    assert row.p99 == pytest.approx(np.percentile(values, 99, method="higher"))


@pytest.mark.parametrize("words", [("--running", "0"), ("--running", "8", "-1"), ("--steps", "0")])
def test_nothing_to_measure_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="it must be at least 1"):
        run(parse(*words))


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be written"):
        run(parse("--json", str(tmp_path / "missing" / "figures.json")))
