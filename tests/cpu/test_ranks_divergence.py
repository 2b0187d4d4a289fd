"""Ranks with as many slices as ranks, the default, over teacher-forced positions: the divergence from exact, in nats.

Exact is one rank with the same slices, whose inputs are quantised alike. The yardstick is that of
test_divergence.py: the recorded divergence between summation orders of the reference with all its sums in FP32.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from glint.native import abi
from tests.cpu.rank_engine import GLM47_SHAPE, LAYOUTS, glm47_model, open_testing_engine
from tests.cpu.small_engine import Session, make_ask
from tests.cpu.testing_library import declare
from tests.reference.expected import NUM_SEQUENCES, SEQUENCE_TOKENS, make_sequences, mean_kl, read_yardstick
from tests.reference.recorded_cases import RANKS

ALLOWED_RATIO = 1.5
MAX_ROWS = 64
VOCAB_SIZE: int = GLM47_SHAPE["vocab_size"]
SEQUENCES = make_sequences(VOCAB_SIZE)


@cache
def logits_over(**changes: int) -> NDArray[np.float32]:
    """Logits [positions, vocab] of all positions of all sequences, each computed in one step."""
    floats, ints = ctypes.POINTER(ctypes.c_float), ctypes.POINTER(ctypes.c_int32)
    read = declare(
        "glint_testing_rank_logits", ctypes.c_int32, ctypes.POINTER(abi.Engine), floats, ints, ctypes.c_int64
    )
    parts: list[Any] = []
    with open_testing_engine(glm47_model("fp8_channel"), max_step_items=MAX_ROWS, num_threads=2, **changes) as engine:
        for sequence in SEQUENCES:
            session = Session(engine)
            request_id = session.add(make_ask(sequence, 1))
            session.step([(request_id, SEQUENCE_TOKENS)])
            session.free(request_id)
            for rows in np.split(np.arange(SEQUENCE_TOKENS, dtype=np.int32), SEQUENCE_TOKENS // MAX_ROWS):
                out = np.full((len(rows), VOCAB_SIZE), np.nan, np.float32)
                status = read(engine._engine, out.ctypes.data_as(floats), rows.ctypes.data_as(ints), len(rows))
                assert status == abi.STATUS_OK
                parts.append(out)
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def between_orders() -> float:
    """The yardstick."""
    return read_yardstick(RANKS, Path(glm47_model("fp8_channel").folder))


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_stay_near_exact(
    num_ranks: int, layout: str, between_orders: float, capsys: pytest.CaptureFixture[str]
) -> None:
    slices = {"row_slices": num_ranks, "expert_layout": LAYOUTS[layout]}
    exact = logits_over(kernels=abi.KERNELS_EXACT, **slices)
    assert exact.shape == (NUM_SEQUENCES * SEQUENCE_TOKENS, VOCAB_SIZE) and len(exact) >= 500
    divergence = mean_kl(exact, logits_over(num_ranks=num_ranks, **slices))
    with capsys.disabled():
        print(f"\n{num_ranks} ranks {layout}: {divergence:.2e} nats from exact,", end=" ")
        print(f"{divergence / between_orders:.2f} of the {between_orders:.2e} between orders", end=" ")
    assert 0 < divergence <= ALLOWED_RATIO * between_orders


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_ranks_are_exact(num_ranks: int, layout: str) -> None:
    """Logits of all positions are bitwise those of one exact rank."""
    slices = {"kernels": abi.KERNELS_EXACT, "row_slices": num_ranks, "expert_layout": LAYOUTS[layout]}
    np.testing.assert_array_equal(logits_over(num_ranks=num_ranks, **slices), logits_over(**slices))


def test_a_mistake_goes_over_the_bound(between_orders: float) -> None:
    """Rows quantised in other slices are another arithmetic, and it shows."""
    exact, other = (logits_over(kernels=abi.KERNELS_EXACT, row_slices=count) for count in (8, 1))
    assert mean_kl(exact, other) > ALLOWED_RATIO * between_orders
