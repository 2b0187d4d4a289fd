"""Whole models on the GPU: layer by layer, over teacher-forced positions, token by token.

FP8 checkpoints are held to the exact CPU path, BF16 checkpoints to the reference with CUDA's rounding points, since the
CPU keeps BF16 checkpoints' activations in FP32.

Where activations are rounded, one number on the other side of a rounding moves its row and may choose another expert.
How much follows from the error of a GEMM, which the reference can be given. Seen with noise of 1e-6 in every FP8
GEMM, with 1.3e-4 as Hopper's short accumulator has it, and with the mistakes of `BREAKAGES`:

| FP8 | 1e-6 | 1.3e-4 | mistakes |
|---|---|---|---|
| median row of a layer | 1e-5, at rank shapes 1.3e-2 | 2.8e-2 to 3.8e-2 | from 7.9e-2 |
| all rows of a layer | 7e-3 to 1.7e-2, 7.2e-2 with another expert | 3.2e-2 to 7.8e-2 | from 9e-2 |
| KL over that between orders | 0.9 to 1.0 | 1.3 to 2.2 | from 3.2, but for the router's bias in glm47 |

Layers start from rows without ties: an embedding row in BF16 times a norm weight in BF16 has numbers exactly between
two values, which the last bit of the norm decides, and the norm on CUDA is within 3e-7 of the CPU's, not equal to it.
Seen on an H200 from rows with ties: median rows of 3e-3 to 5e-2, all rows 2e-2 to 1.7e-1. A model of the CUDA flow in
NumPy gives those figures digit by digit, and from rows without ties medians under 1e-6 at small shapes; that was not
run on a GPU yet. KL on an H200: 0.8 to 1.2 with the portable kernels, 0.8 to 2.9 with Hopper's.

BF16 checkpoints with sums in FP32 have a median row of 2e-4, at rank shapes 2.3e-3. Tokens are counted along whole
answers: of the 160 positions of five answers the reference with sums in FP32 clearly parts from itself at up to 3, with
the CPU's rounding points at up to 8, with a mistake at 28 or more; the median error of the best log-probabilities is up
to 0.03, up to 0.09, and from 0.35.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from glint.engine.args import Kernels
from tests.cpu.parity import GAP_BOUND, Rows
from tests.cpu.tapped_engine import Answer
from tests.cpu.test_layers import layer_errors
from tests.gpu.cases import (
    ANSWER_TOKENS,
    BF16_KEYS,
    CUDA_KERNELS,
    FP8_KEYS,
    RANK_KEYS,
    TIE_BREAK,
    CaseStore,
    Key,
    cuda_engine,
    logits_over,
)
from tests.reference import transformers_reference as reference

SMALL_MEDIAN_BOUND = {"bf16": 5e-4, "portable": 1e-3, "hopper": 6e-2}
RANK_MEDIAN_BOUND = {"bf16": 4e-3, "portable": 4e-2, "hopper": 6e-2}
WHOLE_BOUND = {"bf16": 4e-2, "portable": 1e-1, "hopper": 2e-1}
ALLOWED_RATIO = {"portable": 1.5, "hopper": 3.1}
CLEAR_SHARE_BOUND = 0.05
LOGPROB_MEDIAN_BOUND = 0.05
DIVERGENCE_KEYS = [key for key in FP8_KEYS if key[0] == "glm47"]
every_kernels = pytest.mark.parametrize("kernels", CUDA_KERNELS)


@every_kernels
@pytest.mark.parametrize("key", [*FP8_KEYS, *BF16_KEYS], ids="-".join)
def test_each_layer_from_the_same_hidden_state(
    cases: CaseStore, key: Key, kernels: Kernels, capsys: pytest.CaptureFixture[str]
) -> None:
    states = cases.states(key)
    with cuda_engine(cases.case(key).folder, kernels) as engine:
        engine.poison_pages()
        got = engine.hidden_states(cases.case(key).tokens, dict(enumerate(states)))
    np.testing.assert_allclose(got[0], states[0], rtol=0 if key[1] == "bf16" else TIE_BREAK)
    errors = layer_errors(got, states)
    whole, median = max(error.whole for error in errors), max(error.median for error in errors)
    with capsys.disabled():
        print(f"\n{'-'.join(key)} {kernels}: whole {whole:.1e}, median row {median:.1e}", end=" ")
    arithmetic = "bf16" if key[1] == "bf16" else kernels
    assert whole < WHOLE_BOUND[arithmetic]
    assert median < (RANK_MEDIAN_BOUND if key in RANK_KEYS else SMALL_MEDIAN_BOUND)[arithmetic]


@every_kernels
@pytest.mark.parametrize("key", DIVERGENCE_KEYS, ids="-".join)
def test_fp8_stays_near_exact_over_teacher_forced_positions(
    cases: CaseStore, key: Key, kernels: Kernels, capsys: pytest.CaptureFixture[str]
) -> None:
    case = cases.case(key)
    with cuda_engine(case.folder, kernels) as engine:
        got = logits_over(engine, case.sequences)
    assert len(got) >= 500
    divergence, yardstick = reference.mean_kl(cases.exact_logits(key), got), cases.between_orders(key)
    with capsys.disabled():
        ratio = divergence / yardstick
        print(f"\n{'-'.join(key)} {kernels}: {divergence:.2e} nats, {ratio:.2f} of two orders", end=" ")
    assert 0 < divergence <= ALLOWED_RATIO[kernels] * yardstick


@dataclass(frozen=True)
class Agreement:
    """Where an answer's tokens are not the reference's and it was sure, and the error of the best log-probabilities."""

    is_clear_difference: list[bool]
    logprob_errors: list[float]

    @classmethod
    def of(cls, answer: Answer, rows: Rows) -> "Agreement":
        """Compare every position of an answer with the reference's logits [tokens, vocab] along it."""
        expected = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
        best = expected.max(axis=1)
        behind = best - expected[np.arange(len(rows)), answer.tokens]
        errors = [
            max(abs(value - row[token]) for token, value in found.items())
            for row, found in zip(expected, answer.logprobs, strict=True)
        ]
        return cls((behind >= GAP_BOUND).tolist(), errors)


@every_kernels
@pytest.mark.parametrize("key", BF16_KEYS, ids="-".join)
def test_bf16_answers_are_the_references(
    cases: CaseStore, key: Key, kernels: Kernels, capsys: pytest.CaptureFixture[str]
) -> None:
    with cuda_engine(cases.case(key).folder, kernels) as engine:
        engine.poison_pages()
        answers = engine.answer(cases.case(key).prompts, ANSWER_TOKENS)
    agreements = [Agreement.of(answer, cases.rows_along(key, answer)) for answer in answers]
    is_clear = np.concatenate([agreement.is_clear_difference for agreement in agreements])
    median = float(np.median(np.concatenate([agreement.logprob_errors for agreement in agreements])))
    with capsys.disabled():
        print(f"\n{'-'.join(key)} {kernels}: {is_clear.sum()} of {len(is_clear)} tokens differ clearly,", end=" ")
        print(f"median error of log-probabilities {median:.1e}", end=" ")
    assert is_clear.mean() <= CLEAR_SHARE_BOUND
    assert median <= LOGPROB_MEDIAN_BOUND
