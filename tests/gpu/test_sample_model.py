"""The sample model on the GPU: as good at English as the exact CPU path, and no further from it than the fast CPU path.

FP8 is chaotic: any other order of sums moves some E4M3 values. The yardstick is how far the fast CPU kernels of the
same machine are from the exact ones over the same positions.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from glint.engine.args import Device, Kernels
from glint.text.tokenizer import Tokenizer
from tests.cpu.tapped_engine import TappedEngine
from tests.cpu.test_sample_parity import PROMPTS, TEXT
from tests.gpu.cases import CPU_THREADS, CUDA_KERNELS
from tests.reference.transformers_reference import mean_kl

PERPLEXITY_BOUND = 0.04
ALLOWED_RATIO = 1.5
ANSWER_TOKENS = 32


@pytest.fixture(scope="module")
def tokens(sample_model: Path) -> list[int]:
    """The text that is scored."""
    return Tokenizer(sample_model).encode(TEXT)


def logits_of(folder: Path, tokens: list[int], kernels: Kernels, device: Device) -> NDArray[np.float32]:
    """Logits of every position of the text."""
    with TappedEngine(folder, kernels, CPU_THREADS, device) as engine:
        return engine.logits(tokens)


@pytest.fixture(scope="module")
def exact(sample_model: Path, tokens: list[int]) -> Iterator[NDArray[np.float32]]:
    """The exact CPU path."""
    yield logits_of(sample_model, tokens, "exact", "cpu")


def perplexity(logits: NDArray[np.float32], tokens: list[int]) -> float:
    """exp of the mean negative log-probability of every token but the first."""
    rows = logits[:-1].astype(np.float64)
    chosen = rows[np.arange(len(rows)), tokens[1:]] - np.logaddexp.reduce(rows, axis=1)
    return math.exp(-float(chosen.mean()))


@pytest.mark.parametrize("kernels", CUDA_KERNELS)
def test_the_text_is_scored_as_on_the_cpu(
    sample_model: Path,
    tokens: list[int],
    exact: NDArray[np.float32],
    kernels: Kernels,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fast = logits_of(sample_model, tokens, "auto", "cpu")
    got = logits_of(sample_model, tokens, kernels, "cuda")
    divergence, yardstick = mean_kl(exact, got), mean_kl(exact, fast)
    scores = [perplexity(logits, tokens) for logits in (exact, fast, got)]
    with capsys.disabled():
        print(f"\nsample model {kernels}: KL {divergence:.2e}, fast CPU {yardstick:.2e};", end=" ")
        print("perplexity exact {:.3f}, fast {:.3f}, cuda {:.3f}".format(*scores), end=" ")
    assert len(tokens) > 200 and scores[0] < 30
    assert scores[2] == pytest.approx(scores[0], rel=PERPLEXITY_BOUND)
    assert 0 < divergence < ALLOWED_RATIO * yardstick


@pytest.mark.parametrize("kernels", CUDA_KERNELS)
def test_answers_are_english(sample_model: Path, kernels: Kernels) -> None:
    tokenizer = Tokenizer(sample_model)
    with TappedEngine(sample_model, kernels, device="cuda") as engine:
        answers = engine.answer([tokenizer.encode(prompt) for prompt in PROMPTS], ANSWER_TOKENS)
    assert "Paris" in tokenizer.decode(answers[0].tokens)
