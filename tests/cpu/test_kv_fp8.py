"""E4M3 keys and values on the CPU: rounded at the store, otherwise as without.

The reference is transformers in float64 with the engine's rounding points, whose keys behind the rotary embedding and
values go through torch's float8_e4m3fn; its answers are recorded. Seen against it: 8e-7 in log-probability, as without
rounding. LOSSES are the mean KL in nats from pages that are not rounded, as seen.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from glint.native import abi
from glint.native.library import NativeEngine, Unsupported, load_library, plan_engine
from tests.cpu.e4m3_values import all_bf16, edge_values, rounded, rows_of, same_numbers, stored
from tests.cpu.operations import Operations, PageCache, PagedRequest
from tests.cpu.parity import assert_parity, compare
from tests.cpu.rounded_pages import rounded_pages
from tests.cpu.small_engine import Ask, answer_all, engine_options, make_ask, open_engine, small_model
from tests.cpu.tapped_engine import TappedEngine
from tests.cpu.testing_library import load_testing_library
from tests.reference.checkpoints import Family, Weights, make_checkpoint
from tests.reference.expected import mean_kl, read_recorded, recorded_name
from tests.reference.numpy_ops import FloatArray
from tests.reference.recorded_cases import ROUNDED_CACHE, ROUNDED_CACHE_CASES, ROUNDED_CACHE_TOKENS

pytestmark = pytest.mark.sanitize

LOGPROB_BOUND = 1e-4
LOSSES = dict(zip(ROUNDED_CACHE_CASES, (0.13, 0.27, 0.28), strict=True))
LOSS_MARGIN = 1.5
WEIGHTS: tuple[Weights, ...] = ("fp8_channel", "bf16")


def library() -> ctypes.CDLL:
    """The testing library, declared."""
    return load_library(Path(load_testing_library()._name))


def engine_of(weights: Weights, **changes: int) -> NativeEngine:
    """An engine on the small model, from the testing library."""
    return open_engine(small_model(weights), library(), **changes)


def asks() -> list[Ask]:
    """Prompts of several lengths."""
    source = np.random.default_rng(3)
    return [make_ask(tuple(source.integers(0, 257, length).tolist()), 9) for length in (1, 7, 40, 133)]


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
@pytest.mark.parametrize("kernels", ["exact", "auto"])
@pytest.mark.parametrize("numbers", [all_bf16, edge_values])
def test_a_page_keeps_what_torch_rounds(dtype: type, kernels: str, numbers: Callable[[], FloatArray]) -> None:
    """All bfloat16 numbers and those at the edges, as keys and, in the other order, as values."""
    keys, values = rows_of(numbers()), rows_of(numbers()[::-1].copy())
    nothing = (np.empty((len(keys), 0), np.float32),) * 2
    with Operations(kernels, 2) as operations:

        def store(
            heads: tuple[FloatArray, FloatArray, FloatArray], cache: PageCache, requests: list[PagedRequest]
        ) -> None:
            operations.rope_and_cache(heads, None, nothing, cache, 1, requests)

        kept = stored(store, keys, values, 16, dtype, "rounded")
        plain = stored(store, keys, values, 16, dtype, "none")
    for seen, given in zip(kept, (keys, values), strict=True):
        same_numbers(seen, rounded(given.reshape(seen.shape)))
    assert not np.array_equal(plain[0], kept[0])


@pytest.mark.parametrize(("family", "weights"), ROUNDED_CACHE_CASES)
def test_answers_are_those_of_the_rounded_reference(tmp_path: Path, family: Family, weights: Weights) -> None:
    folder = make_checkpoint(tmp_path, family, weights)
    recorded = read_recorded(recorded_name(family, weights, ROUNDED_CACHE))
    recorded.check_folder(folder)
    with rounded_pages(), TappedEngine(folder, "exact") as engine:
        engine.poison_pages()
        answers = engine.answer(recorded.prompts, ROUNDED_CACHE_TOKENS)
    with TappedEngine(folder, "exact") as engine:
        unrounded = engine.answer(recorded.prompts, ROUNDED_CACHE_TOKENS)
    comparisons = [compare(best, answer) for best, answer in zip(recorded.answers, answers, strict=True)]
    others = [compare(best, answer) for best, answer in zip(recorded.answers, unrounded, strict=True)]
    assert_parity(comparisons, LOGPROB_BOUND, ROUNDED_CACHE_TOKENS)
    assert max(comparison.largest_error for comparison in others) > 10 * LOGPROB_BOUND


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_option_rounds_and_the_schedule_changes_nothing(weights: Weights) -> None:
    with engine_of(weights, kv_dtype=abi.DTYPE_F8_E4M3) as engine:
        answers = [answer_all(engine, [ask])[0] for ask in asks()]
        again = answer_all(engine, asks())
    with engine_of(weights, kv_dtype=abi.DTYPE_F8_E4M3) as engine:
        chunked = answer_all(engine, asks(), 7)
    with rounded_pages(), engine_of(weights) as engine:
        rounded = answer_all(engine, asks())
    with engine_of(weights) as engine:
        plain = answer_all(engine, asks())
    assert answers == again == chunked == rounded
    assert answers[1:] != plain[1:]
    assert again[-1].cached_tokens > 0


def test_pages_are_no_smaller() -> None:
    for weights in WEIGHTS:
        plans = [
            plan_engine(library(), engine_options(small_model(weights), kv_dtype=dtype))
            for dtype in (0, abi.DTYPE_F8_E4M3)
        ]
        assert plans[0].bytes_per_page == plans[1].bytes_per_page


@pytest.mark.parametrize(("weights", "dtype"), [("bf16", abi.DTYPE_BF16), ("fp8_channel", abi.DTYPE_F32), ("bf16", 9)])
def test_other_types_are_refused(weights: Weights, dtype: int) -> None:
    with pytest.raises(Unsupported, match=rf"options\.kv_dtype is {dtype}; the CPU library keeps"):
        plan_engine(library(), engine_options(small_model(weights), kv_dtype=dtype))


@pytest.mark.parametrize(("family", "weights"), ROUNDED_CACHE_CASES)
def test_the_loss_is_small(
    tmp_path: Path, family: Family, weights: Weights, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_checkpoint(tmp_path, family, weights)
    tokens = np.random.default_rng(0).integers(0, 950, 500).tolist()
    with TappedEngine(folder, "auto") as engine:
        plain = engine.logits(tokens)
    with rounded_pages(), TappedEngine(folder, "auto") as engine:
        rounded = engine.logits(tokens)
    loss = mean_kl(plain, rounded)
    with capsys.disabled():
        print(f"\n{family} {weights}: E4M3 pages {loss:.2e} nats from the others", end=" ")
    assert 0 < loss < LOSS_MARGIN * LOSSES[family, weights]
