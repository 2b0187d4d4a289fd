"""E4M3 pages on the GPU: bitwise BF16 pages of the same rounded numbers, at half the bytes, and what they lose.

LOSSES are the largest mean KL from BF16 pages seen on an H200, in nats (`docs/results.md`).
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.engine.args import Kernels
from glint.native import abi
from glint.native.library import InvalidArgument, NativeEngine, load_library, plan_engine
from tests.cpu.e4m3_values import (
    HEAD_DIM,
    all_bf16,
    edge_values,
    is_finite_in_bf16,
    rounded,
    rows_of,
    same_numbers,
    stored,
)
from tests.cpu.operations import PageCache, PagedRequest, Rounding
from tests.cpu.rounded_pages import rounded_pages
from tests.cpu.small_engine import Ask, Session, answer_all, engine_options, make_ask, small_model
from tests.cpu.tapped_engine import TappedEngine
from tests.cpu.testing_library import load_testing_library
from tests.gpu.cases import CUDA_KERNELS, CaseStore, Key, logits_over
from tests.gpu.operations_cuda import CudaOperations
from tests.gpu.sessions import CUDA_OPTIONS, PAGE_TOKENS, kernels_of, open_cuda
from tests.reference.numpy_ops import FloatArray
from tests.reference.transformers_reference import mean_kl

PATHS = [
    "small-fp8_channel-portable",
    "small-bf16-portable",
    "rank-fp8_channel-hopper",
    "rank-fp8_channel-portable",
    "rank-bf16-hopper",
    "rank-bf16-portable",
]
LOSSES: dict[Key, float] = {
    ("glm47", "fp8_channel"): 0.29,
    ("glm47", "bf16"): 0.15,
    ("rank", "fp8_channel"): 0.20,
    ("rank", "bf16"): 0.08,
}
LOSS_MARGIN = 1.5
REPEATS = 10
LONGEST = 1300
MANY_ROWS = 512


@dataclass(frozen=True)
class ComputePath:
    """A checkpoint and its kernels."""

    checkpoint: Checkpoint
    kernels: int

    def engine(self, kv_dtype: int = abi.DTYPE_F8_E4M3) -> NativeEngine:
        """A fresh engine, with E4M3 pages unless others are asked for."""
        return open_cuda(self.checkpoint, kernels=self.kernels, kv_dtype=kv_dtype)

    def asks(self) -> list[Ask]:
        """Requests of lengths up to more than one split, every second one sampled."""
        source = random.Random(5)
        lengths = [1, 2, 33, 63, 64, 65, 129, 200, LONGEST]
        vocab_size = self.checkpoint.config.vocab_size
        return [
            make_ask(
                tuple(source.randrange(vocab_size) for _ in range(length)),
                source.randint(2, 12),
                **({"seed": length, "temperature": 0.9} if length % 2 else {}),
            )
            for length in lengths
        ]


@pytest.fixture(scope="module", params=PATHS)
def path(request: pytest.FixtureRequest, cases: CaseStore) -> Iterator[ComputePath]:
    """Each checkpoint and kernel set."""
    shape, weights, kernels = request.param.split("-")
    checkpoint = small_model(weights) if shape == "small" else open_checkpoint(cases.case((shape, weights)).folder)
    yield ComputePath(checkpoint, kernels_of(kernels))


def test_answers_are_those_of_bf16_pages_of_rounded_numbers(path: ComputePath) -> None:
    with path.engine() as engine:
        answers = answer_all(engine, path.asks())
        assert engine.stats().steps_replayed > 0
    with rounded_pages("cuda"), path.engine(abi.DTYPE_BF16) as engine:
        rounded = answer_all(engine, path.asks())
    with path.engine(abi.DTYPE_BF16) as engine:
        plain = answer_all(engine, path.asks())
    assert answers == rounded
    assert answers[2:] != plain[2:]


def test_the_schedule_changes_nothing(path: ComputePath) -> None:
    wanted = path.asks()
    with path.engine() as engine:
        together = answer_all(engine, wanted)
        cached = answer_all(engine, wanted)
    assert cached == together and cached[-1].cached_tokens > LONGEST - 2 * PAGE_TOKENS
    for chunk in (7, 65, 200):
        with path.engine() as engine:
            assert answer_all(engine, wanted, chunk) == together
    with path.engine() as engine:
        session = Session(engine)
        for ask, alone in zip(wanted, together, strict=True):
            request_id = session.add(ask)
            session.run_overlapped()
            assert session.free(request_id) == alone


def test_pages_take_half_and_one_wide_layer(path: ComputePath) -> None:
    library = load_library(Path(load_testing_library("cuda")._name))
    bf16, fp8 = (
        plan_engine(library, engine_options(path.checkpoint, **(CUDA_OPTIONS | {"kv_dtype": dtype}))).bytes_per_page
        for dtype in (0, abi.DTYPE_F8_E4M3)
    )
    assert fp8 == bf16 // 2 + bf16 // path.checkpoint.config.num_layers


def test_other_types_are_refused(path: ComputePath) -> None:
    with pytest.raises(InvalidArgument, match=r"options\.kv_dtype is 1; keys and values are kept in"):
        path.engine(abi.DTYPE_F32)


def store_in_pages(keys: FloatArray, values: FloatArray, rounding: Rounding) -> tuple[FloatArray, FloatArray]:
    """Keys and values [rows, HEAD_DIM] that pages hold, written without norm and rotary."""
    nothing = (np.empty((len(keys), 0), np.float32),) * 2
    with CudaOperations("portable", REPEATS) as cuda:

        def store(
            heads: tuple[FloatArray, FloatArray, FloatArray], cache: PageCache, requests: list[PagedRequest]
        ) -> None:
            cuda.rope_and_cache(heads, None, nothing, cache, requests)

        return stored(store, keys, values, PAGE_TOKENS, np.uint16, rounding)


@pytest.mark.parametrize("rounding", ["fp8", "rounded"])
@pytest.mark.parametrize("least_rows", [1, MANY_ROWS], ids=["few rows", "many rows"])
@pytest.mark.parametrize("numbers", [all_bf16, edge_values])
def test_a_page_keeps_what_torch_rounds(rounding: Rounding, least_rows: int, numbers: Callable[[], FloatArray]) -> None:
    """All numbers that bfloat16 holds, and those at the edges, as keys and, in the other order, as values."""
    once = numbers()[is_finite_in_bf16(numbers())]
    finite = np.tile(once, -(-least_rows * HEAD_DIM // len(once)))
    keys, values = rows_of(finite), rows_of(finite[::-1].copy())
    for seen, given in zip(store_in_pages(keys, values, rounding), (keys, values), strict=True):
        same_numbers(seen, rounded(given.reshape(seen.shape)))


@pytest.mark.parametrize("rounding", ["fp8", "rounded"])
@pytest.mark.parametrize("least_rows", [1, MANY_ROWS], ids=["few rows", "many rows"])
def test_a_row_with_what_no_page_can_keep_has_a_key_of_nan(rounding: Rounding, least_rows: int) -> None:
    """Wherever it stands in the key; in the value, which is then zero."""
    once = edge_values()[~is_finite_in_bf16(edge_values())]
    odd = np.tile(once, -(-least_rows // len(once)))
    places = np.random.default_rng(1).integers(0, HEAD_DIM, len(odd))
    sound, spoiled = np.ones((2, len(odd), 1, HEAD_DIM), np.float32)
    spoiled[np.arange(len(odd)), 0, places] = odd
    keys, values = store_in_pages(spoiled, sound, rounding)
    assert np.isnan(keys).all() and (values == 1).all()
    keys, values = store_in_pages(sound, spoiled, rounding)
    assert np.isnan(keys).all() and (values == 0).all()


@pytest.mark.parametrize("kernels", CUDA_KERNELS)
@pytest.mark.parametrize("key", LOSSES, ids="-".join)
def test_the_loss_is_small(cases: CaseStore, key: Key, kernels: Kernels, capsys: pytest.CaptureFixture[str]) -> None:
    case = cases.case(key)
    with TappedEngine(case.folder, kernels, device="cuda") as engine:
        plain = logits_over(engine, case.sequences)
    with TappedEngine(case.folder, kernels, device="cuda", kv_cache_dtype="fp8") as engine:
        engine.poison_pages()
        rounded = logits_over(engine, case.sequences)
    loss = mean_kl(plain, rounded)
    with capsys.disabled():
        print(f"\n{'-'.join(key)} {kernels}: E4M3 pages {loss:.2e} nats from BF16 pages", end=" ")
    assert 0 < loss < LOSS_MARGIN * LOSSES[key]
