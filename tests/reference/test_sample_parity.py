"""The sample model's longer answers: the exact path's tokens are those of transformers with the rounding points."""

from pathlib import Path

from tests.cpu.parity import answer_rows, assert_parity, compare
from tests.cpu.tapped_engine import TappedEngine
from tests.cpu.test_sample_parity import EXACT_LOGPROB_BOUND
from tests.reference.expected import BestTokens, read_recorded
from tests.reference.recorded_cases import SAMPLE
from tests.reference.transformers_reference import Reference

COUNT = 64


def test_long_exact_answers_are_the_references(sample_model: Path) -> None:
    """The engine answers by itself; the reference then runs once over each prompt and answer."""
    with TappedEngine(sample_model, "exact") as engine:
        answers = engine.answer(read_recorded(SAMPLE).prompts, COUNT)
    model = Reference(sample_model)
    best = [BestTokens.of_rows(answer_rows(model, answer)) for answer in answers]
    comparisons = [compare(*both) for both in zip(best, answers, strict=True)]
    assert_parity(comparisons, EXACT_LOGPROB_BOUND, COUNT)
