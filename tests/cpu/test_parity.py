"""Token parity: the engine's greedy answers are those of transformers in float64 with the engine's rounding points.

The engine answers by itself; the reference then computes every position of prompt and answer in one pass. Up to the
first difference that is the same as letting the reference answer, as both have seen the same tokens.

Log-probability bounds and what was seen: exact 1e-4 (4e-7), fast BF16 1e-3 (3e-5).
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from glint import SamplingParams
from glint.config import Kernels
from tests.cpu.case_store import CaseStore
from tests.cpu.kernel_sets import FAST_KERNELS, require_kernels
from tests.cpu.parity import Comparison, Rows, answer_rows, compare
from tests.cpu.tapped_engine import Answer, TappedEngine
from tests.reference import transformers_reference as reference
from tests.reference.checkpoints import FAMILIES, WEIGHTS, Family, Weights, make_prompts

COUNT = 32
EXACT_LOGPROB_BOUND = 1e-4
FAST_LOGPROB_BOUND = 1e-3
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
class Case:
    """A checkpoint, its prompts, the exact engine's answers, and the reference's logits along those."""

    folder: Path
    prompts: list[list[int]]
    answers: list[Answer]
    rows: list[Rows]

    def compare(self, answers: list[Answer]) -> list[Comparison]:
        """Compare answers to the same prompts with the reference, which runs anew only along other tokens."""
        model = None if self._has_tokens_of(answers) else reference.Reference(self.folder)
        rows = self.rows if model is None else [answer_rows(model, answer) for answer in answers]
        return [compare(part, answer) for part, answer in zip(rows, answers, strict=True)]

    def _has_tokens_of(self, answers: list[Answer]) -> bool:
        return [answer.tokens for answer in answers] == [answer.tokens for answer in self.answers]


def make_case(folder: Path) -> Case:
    """Answers of the exact engine, all pages being NaN before it runs, and the reference along them."""
    model = reference.Reference(folder)
    prompts = make_prompts(model.config.vocab_size)
    answers = poisoned_answers(folder, "exact", prompts)
    return Case(folder, prompts, answers, [answer_rows(model, answer) for answer in answers])


def poisoned_answers(folder: Path, kernels: Kernels, prompts: list[list[int]]) -> list[Answer]:
    """Greedy answers of a fresh engine whose pages were all NaN."""
    with TappedEngine(folder, kernels) as engine:
        engine.poison_pages()
        return engine.answer(prompts, COUNT)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> CaseStore[Case]:
    """The cases of this module."""
    return CaseStore(tmp_path_factory.mktemp("parity"), make_case)


def assert_parity(comparisons: list[Comparison], logprob_bound: float) -> None:
    """No clear difference, log-probabilities alike, and enough tokens compared to mean something."""
    print(*comparisons, sep="\n")
    assert not any(comparison.is_clear_difference for comparison in comparisons)
    assert max(comparison.largest_error for comparison in comparisons) < logprob_bound
    assert sum(comparison.num_alike for comparison in comparisons) > 0.7 * COUNT * len(comparisons)


@pytest.mark.parametrize(("family", "weights"), CASES)
def test_exact_answers_are_the_references(cases: CaseStore[Case], family: Family, weights: Weights) -> None:
    case = cases[family, weights]
    assert len({len(prompt) for prompt in case.prompts}) == 5
    assert_parity(case.compare(case.answers), EXACT_LOGPROB_BOUND)


@pytest.mark.parametrize("kernels", ["auto", *FAST_KERNELS])
@pytest.mark.parametrize("family", FAMILIES)
def test_fast_answers_of_bf16_are_the_references(cases: CaseStore[Case], family: Family, kernels: Kernels) -> None:
    if kernels != "auto":
        require_kernels(kernels)
    case = cases[family, "bf16"]
    answers = poisoned_answers(case.folder, kernels, case.prompts)
    assert_parity(case.compare(answers), FAST_LOGPROB_BOUND)


def test_poison_in_a_held_page_shows(cases: CaseStore[Case]) -> None:
    case = cases["air", "fp8_tensor"]
    prompt = [case.prompts[-1]]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    with TappedEngine(case.folder, "exact") as engine:
        first, *_ = engine.llm.generate(prompt_token_ids=prompt, sampling_params=params)
        engine.poison_pages()
        again, *_ = engine.llm.generate(prompt_token_ids=prompt, sampling_params=params)
    assert first.finish_reason == "length" and again.cached_tokens > 0
    assert again.finish_reason == "failed"


@pytest.mark.parametrize("break_", BREAK_CASES)
def test_each_mistake_is_noticed(cases: CaseStore[Case], break_: str) -> None:
    case = cases[BREAK_CASES[break_]]
    broken = reference.Reference(case.folder, break_=break_)
    comparisons = [compare(answer_rows(broken, answer), answer) for answer in case.answers]
    print(*comparisons, sep="\n")
    assert sum(comparison.is_clear_difference for comparison in comparisons) >= 2
