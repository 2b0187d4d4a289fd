"""The sample model: exact answers are the reference's, as recorded, and all paths are about equally good at English.

Seen over the 277 tokens of TEXT: exact FP8 23.90, fast FP8 23.81 and 23.98 (two orders of sums), BF16 23.31. Another
order of sums flips E4M3 values; the difference in log-probability per token then spreads by 0.17, which over 277 tokens
is one per cent of the perplexity, and FAST_BOUND is four times that.
"""

import math
from pathlib import Path

import pytest

from glint import SamplingParams
from glint.engine.args import Kernels
from glint.sample.model import make_sample_model
from glint.text.tokenizer import Tokenizer
from tests.cpu.parity import assert_parity, compare
from tests.cpu.tapped_engine import TappedEngine
from tests.reference.expected import read_recorded
from tests.reference.recorded_cases import SAMPLE, SAMPLE_TOKENS
from tests.reference.recorded_cases import SAMPLE_PROMPTS as PROMPTS

EXACT_LOGPROB_BOUND = 1e-3
FAST_BOUND = 0.04
BF16_BOUND = 0.05
TEXT = """The lighthouse stood at the end of a long stone pier, and for more than a hundred years its lamp had warned
ships away from the rocks. Every evening the keeper climbed the narrow stairs, cleaned the glass, and lit the flame.
In winter the wind was so strong that he had to hold on to the rail with both hands. His daughter often went with him,
because she liked to watch the boats come home. She knew the name of every captain in the harbour, and she could tell
from the colour of the sails who had caught a lot of fish and who had not. When the first electric lamp was installed,
the old man was not sure what to do with his evenings. He still walked to the tower at sunset, sat on the bench beside
the door, and counted the seconds between the flashes. The light was brighter now, he said, but it did not need him any
more. His daughter laughed and told him that somebody still had to keep the tea warm. In the spring a storm cut the
power to the whole coast, and the lamp went dark for the first time. The keeper climbed the stairs with a box of
matches in his pocket, and by the time the fishing fleet came around the point, the small yellow flame was burning
again. Nobody in the village ever asked him to give back the key."""


@pytest.fixture(scope="module")
def exact(sample_model: Path) -> TappedEngine:
    """The exact engine on the sample model."""
    with TappedEngine(sample_model, "exact") as engine:
        yield engine


def perplexity(engine: TappedEngine, tokens: list[int]) -> float:
    """exp of the mean negative log-probability of every token of a text but the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (completion,) = engine.llm.generate(prompt_token_ids=[tokens], sampling_params=params)
    assert completion.prompt_logprobs is not None and completion.prompt_logprobs[0] is None
    values = [entry[token] for entry, token in zip(completion.prompt_logprobs[1:], tokens[1:], strict=True) if entry]
    assert len(values) == len(tokens) - 1
    return math.exp(-sum(values) / len(values))


def fast_perplexity(folder: Path, tokens: list[int], kernels: Kernels = "auto") -> float:
    """The perplexity of a fast path."""
    with TappedEngine(folder, kernels) as engine:
        return perplexity(engine, tokens)


@pytest.mark.parametrize(
    ("num_prompts", "count"), [(2, 6), pytest.param(len(PROMPTS), SAMPLE_TOKENS, marks=pytest.mark.slow)]
)
def test_exact_answers_are_the_references(
    exact: TappedEngine, sample_model: Path, num_prompts: int, count: int
) -> None:
    tokenizer = Tokenizer(sample_model)
    recorded = read_recorded(SAMPLE)
    recorded.check_folder(sample_model)
    assert [tokenizer.encode(prompt) for prompt in PROMPTS] == recorded.prompts
    answers = exact.answer(recorded.prompts[:num_prompts], count)
    expected = [best.first(count) for best in recorded.answers[:num_prompts]]
    comparisons = [compare(best, answer) for best, answer in zip(expected, answers, strict=True)]
    assert_parity(comparisons, EXACT_LOGPROB_BOUND, count)


@pytest.mark.slow
def test_perplexities_are_close(exact: TappedEngine, sample_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = Tokenizer(sample_model).encode(TEXT)
    assert len(tokens) > 200
    exact_fp8 = perplexity(exact, tokens)
    fast_fp8 = fast_perplexity(sample_model, tokens)
    bf16 = fast_perplexity(make_sample_model("bf16"), tokens)
    with capsys.disabled():
        print(f"\nperplexity over {len(tokens)} tokens:", end=" ")
        print(f"exact FP8 {exact_fp8:.4f}, fast FP8 {fast_fp8:.4f}, BF16 {bf16:.4f}")
    assert 2 < bf16 < 30
    assert fast_fp8 == pytest.approx(exact_fp8, rel=FAST_BOUND)
    assert bf16 == pytest.approx(exact_fp8, rel=BF16_BOUND)
