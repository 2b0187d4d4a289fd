"""Token parity: the engine's greedy answers are those of transformers in float64 with the engine's rounding points.

The answers of transformers are recorded with the best tokens at each place, for every family and kind of weights.

Log-probability bounds and what was seen: exact 1e-4 (8e-7), fast BF16 1e-3 (3e-5). Logits of a whole vocabulary: 1e-4.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from glint import SamplingParams
from glint.engine.args import Kernels
from tests.cpu.case_store import CaseStore, quick_or_slow
from tests.cpu.kernel_sets import FAST_KERNELS, require_kernels
from tests.cpu.parity import Comparison, assert_parity, compare
from tests.cpu.tapped_engine import Answer, TappedEngine
from tests.reference.checkpoints import FAMILIES, Family, Weights, make_checkpoint
from tests.reference.expected import RecordedModel, read_recorded, recorded_name
from tests.reference.recorded_cases import ANSWER_TOKENS, BREAK_CASES, MODEL_CASES, QUICK_CASES

pytestmark = pytest.mark.sanitize

EXACT_LOGPROB_BOUND = 1e-4
FAST_LOGPROB_BOUND = 1e-3
LOGIT_BOUND = 1e-4
EVERY_CASE = pytest.mark.parametrize(("family", "weights"), quick_or_slow(MODEL_CASES, QUICK_CASES))


@dataclass(frozen=True)
class Case:
    """A checkpoint, what is recorded of it, the exact engine's answers and its logits behind the last prompt."""

    folder: Path
    recorded: RecordedModel
    answers: list[Answer]
    logits: np.ndarray

    def compare(self, answers: list[Answer]) -> list[Comparison]:
        """Compare answers to the recorded prompts with the recorded answers."""
        return compare_all(self.recorded, answers)


def compare_all(recorded: RecordedModel, answers: list[Answer]) -> list[Comparison]:
    """Compare each answer with the recorded one."""
    assert [answer.prompt for answer in answers] == recorded.prompts
    return [compare(best, answer) for best, answer in zip(recorded.answers, answers, strict=True)]


def make_case(folder: Path, family: Family, weights: Weights) -> Case:
    """Run the exact engine over the recorded prompts, all pages being NaN before."""
    recorded = read_recorded(recorded_name(family, weights))
    recorded.check_folder(folder)
    with TappedEngine(folder, "exact") as engine:
        engine.poison_pages()
        answers = engine.answer(recorded.prompts, ANSWER_TOKENS)
        return Case(folder, recorded, answers, engine.logits(recorded.prompts[-1])[-1])


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> CaseStore[Case]:
    """The cases of this module."""
    return CaseStore(tmp_path_factory.mktemp("parity"), make_case)


@EVERY_CASE
def test_exact_answers_are_the_references(cases: CaseStore[Case], family: Family, weights: Weights) -> None:
    case = cases[family, weights]
    assert [len(prompt) for prompt in case.recorded.prompts] == [1, 7, 16, 33, 60]
    assert_parity(case.compare(case.answers), EXACT_LOGPROB_BOUND, ANSWER_TOKENS)


@EVERY_CASE
def test_exact_logits_are_the_references(cases: CaseStore[Case], family: Family, weights: Weights) -> None:
    """Over the whole vocabulary, of which answers show the best tokens only."""
    case = cases[family, weights]
    assert case.recorded.logits.std() > 2
    np.testing.assert_allclose(case.logits, case.recorded.logits, rtol=0, atol=LOGIT_BOUND)


def test_the_fp8_method_is_what_groups_and_tiles_are(cases: CaseStore[Case], tmp_path: Path) -> None:
    """The same weights under the names and the config of the fp8 method, which says nothing of groups."""
    case = cases["air", "fp8_group"]
    folder = make_checkpoint(tmp_path, "air", "fp8_method")
    with TappedEngine(folder, "exact") as engine:
        np.testing.assert_array_equal(engine.logits(case.recorded.prompts[-1])[-1], case.logits)


@pytest.mark.parametrize("kernels", ["auto", *FAST_KERNELS])
@pytest.mark.parametrize("family", quick_or_slow(list(FAMILIES), ["glm47", "tied"]))
def test_fast_answers_of_bf16_are_the_references(cases: CaseStore[Case], family: Family, kernels: Kernels) -> None:
    if kernels != "auto":
        require_kernels(kernels)
    case = cases[family, "bf16"]
    with TappedEngine(case.folder, kernels) as engine:
        engine.poison_pages()
        answers = engine.answer(case.recorded.prompts, ANSWER_TOKENS)
    assert_parity(case.compare(answers), FAST_LOGPROB_BOUND, ANSWER_TOKENS)


def test_poison_in_a_held_page_shows(cases: CaseStore[Case]) -> None:
    case = cases["air", "fp8_tensor"]
    prompt = [case.recorded.prompts[-1]]
    params = SamplingParams(temperature=0.0, max_tokens=4)
    with TappedEngine(case.folder, "exact") as engine:
        first, *_ = engine.llm.generate(prompt_token_ids=prompt, sampling_params=params)
        engine.poison_pages()
        again, *_ = engine.llm.generate(prompt_token_ids=prompt, sampling_params=params)
    assert first.finish_reason == "length" and again.cached_tokens > 0
    assert again.finish_reason == "failed"


@pytest.mark.parametrize("break_", BREAK_CASES)
def test_each_mistake_is_noticed(cases: CaseStore[Case], break_: str) -> None:
    """What the reference answers with a deliberate mistake is recorded too, and is not what the engine answers."""
    case = cases[BREAK_CASES[break_]]
    broken = read_recorded(recorded_name(*BREAK_CASES[break_], break_))
    broken.check_folder(case.folder)
    comparisons = compare_all(broken, case.answers)
    print(*comparisons, sep="\n")
    assert sum(comparison.is_clear_difference for comparison in comparisons) >= 2
