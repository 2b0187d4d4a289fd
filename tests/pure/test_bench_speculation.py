"""What `glint bench cpu` says of speculation."""

from collections.abc import Iterator
from typing import Any

import pytest

from glint.bench import speculation
from glint.bench.speculation import _measure_batch, _Run
from glint.errors import EngineError


def let_runs_be(monkeypatch: pytest.MonkeyPatch, runs: list[_Run]) -> None:
    """Let the bench see these runs, one after the other."""
    left: Iterator[_Run] = iter(runs)
    monkeypatch.setattr(speculation, "_time_answers", lambda *_: next(left))


def run(speed: float, drafts: int = 0, accepted: int = 0, answer: int = 0) -> _Run:
    """A run with one answer of one token."""
    return _Run(speed, drafts, accepted, {0: [answer]})


def test_speeds_and_ratio_are_medians_of_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [(10.0, 30.0), (20.0, 22.0), (40.0, 24.0)]
    measured = [part for plain, drafted in turns for part in (run(plain), run(drafted, 5, 3))]
    let_runs_be(monkeypatch, [run(1000.0, 900, 900), *measured])
    engines: Any = (None, None)
    tokenizer: Any = None
    row = _measure_batch(engines, tokenizer, 8, 64)
    assert (row.batch, row.plain_tokens_per_second, row.tokens_per_second) == (8, 20.0, 24.0)
    assert row.ratio == pytest.approx(1.1)
    assert (row.draft_tokens, row.accepted_tokens) == (15, 9)


def test_other_answers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    let_runs_be(monkeypatch, [run(1.0), run(1.0, answer=4), run(1.0, answer=5)])
    engines: Any = (None, None)
    tokenizer: Any = None
    with pytest.raises(EngineError, match="not those without"):
        _measure_batch(engines, tokenizer, 1, 64)
