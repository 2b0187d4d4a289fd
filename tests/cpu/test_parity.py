"""Token parity: the engine's greedy answers are those of transformers in float64 with the engine's rounding points.

The engine answers by itself; the reference then computes every position of prompt and answer in one pass. Up to the
first difference that is the same as letting the reference answer, as both have seen the same tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.cpu.kernel_sets import FAST_KERNELS, require_kernels
from tests.cpu.tapped_engine import Answer, TappedEngine
from tests.reference.checkpoints import FAMILIES, WEIGHTS, Family, Weights, make_checkpoint, make_prompts

reference = pytest.importorskip("tests.reference.transformers_reference")

COUNT = 32
GAP_BOUND = 0.02
EXACT_LOGPROB_BOUND = 1e-4
FAST_BF16_LOGPROB_BOUND = 2e-3
CASES = [(family, weights) for family in FAMILIES for weights in WEIGHTS]
BREAK_CASES: dict[str, tuple[Family, Weights]] = {
    "rotary_halves": ("glm47", "fp8_channel"),
    "bias_in_weights": ("glm47", "bf16"),
    "scaling_twice": ("tied", "bf16"),
    "shared_dropped": ("air", "fp8_tensor"),
    "qk_norm_skipped": ("groups", "bf16"),
    "scale_row_shifted": ("air", "fp8_block"),
}


@dataclass(frozen=True)
class Comparison:
    """How far an answer goes with the reference: tokens alike, the gap where it leaves, and the logprob errors."""

    num_alike: int
    gap_at_difference: float | None
    largest_error: float

    @property
    def is_clear_difference(self) -> bool:
        """Whether the reference was sure of another token."""
        return self.gap_at_difference is not None and self.gap_at_difference >= GAP_BOUND


def compare(rows: NDArray[np.float64], answer: Answer) -> Comparison:
    """Compare an answer with the reference's logits at each of its tokens, [count, vocab]."""
    logprobs = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
    largest_error = 0.0
    for index, token in enumerate(answer.tokens):
        if int(rows[index].argmax()) != token:
            best = np.sort(rows[index])[-2:]
            return Comparison(index, float(best[1] - best[0]), largest_error)
        listed = answer.logprobs[index]
        assert len(listed) == 5 and set(listed) <= set(np.argsort(-rows[index])[:8].tolist())
        errors = [abs(value - logprobs[index, token]) for token, value in listed.items()]
        largest_error = max(largest_error, *errors)
    return Comparison(len(answer.tokens), None, largest_error)


def compare_all(model: "reference.Reference", answers: list[Answer]) -> list[Comparison]:
    """Compare every answer with one forward pass of the reference over prompt and answer."""
    found = []
    for answer in answers:
        rows = model.logits(answer.prompt + answer.tokens)[len(answer.prompt) - 1 : -1]
        found.append(compare(rows, answer))
    return found


@dataclass(frozen=True)
class Case:
    """A checkpoint, its prompts, the exact engine's answers with poisoned pages, and the reference's comparisons."""

    folder: Path
    prompts: list[list[int]]
    answers: list[Answer]
    comparisons: list[Comparison]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> "CaseStore":
    """The cases, each made when first asked for."""
    return CaseStore(tmp_path_factory.mktemp("parity"))


class CaseStore:
    """Makes each case once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[tuple[Family, Weights], Case] = {}

    def __getitem__(self, key: tuple[Family, Weights]) -> Case:
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, family: Family, weights: Weights) -> Case:
        folder = make_checkpoint(self._root / f"{family}-{weights}", family, weights)
        model = reference.Reference(folder)
        prompts = make_prompts(model.config.vocab_size)
        with TappedEngine(folder, "exact") as engine:
            engine.poison_pages()
            answers = engine.answer(prompts, COUNT)
        return Case(folder, prompts, answers, compare_all(model, answers))


def assert_parity(comparisons: list[Comparison], logprob_bound: float) -> None:
    """No clear difference, log-probabilities alike, and enough tokens compared to mean something."""
    assert not any(comparison.is_clear_difference for comparison in comparisons), comparisons
    assert max(comparison.largest_error for comparison in comparisons) < logprob_bound
    assert sum(comparison.num_alike for comparison in comparisons) > 0.7 * COUNT * len(comparisons)


@pytest.mark.parametrize(("family", "weights"), CASES)
def test_exact_answers_are_the_references(cases: CaseStore, family: Family, weights: Weights) -> None:
    case = cases[family, weights]
    print(family, weights, case.comparisons)
    assert_parity(case.comparisons, EXACT_LOGPROB_BOUND)
    assert len({len(prompt) for prompt in case.prompts}) == 5


@pytest.mark.parametrize("kernels", ["auto", *FAST_KERNELS])
@pytest.mark.parametrize("family", FAMILIES)
def test_fast_answers_of_bf16_are_the_references(cases: CaseStore, family: Family, kernels: str) -> None:
    if kernels != "auto":
        require_kernels(kernels)
    case = cases[family, "bf16"]
    with TappedEngine(case.folder, kernels) as engine:
        engine.poison_pages()
        answers = engine.answer(case.prompts, COUNT)
    comparisons = [
        known if answer.tokens == exact.tokens else None
        for known, answer, exact in zip(case.comparisons, answers, case.answers, strict=True)
    ]
    if None in comparisons:
        assert_parity(compare_all(reference.Reference(case.folder), answers), FAST_BF16_LOGPROB_BOUND)


@pytest.mark.parametrize("break_", BREAK_CASES)
def test_each_mistake_is_noticed(cases: CaseStore, break_: str) -> None:
    case = cases[BREAK_CASES[break_]]
    comparisons = compare_all(reference.Reference(case.folder, break_=break_), case.answers)
    print(break_, comparisons)
    assert sum(comparison.is_clear_difference for comparison in comparisons) >= 2
