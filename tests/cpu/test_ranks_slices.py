"""What each rank holds: the slices of glint.checkpoint.placement; elements, scales and biases as in the files."""

import itertools
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from glint.checkpoint.layout import Dtype, Part, Role
from glint.checkpoint.placement import ExpertLayout, find_split_problems, kv_heads_of, slice_of
from glint.checkpoint.table import Checkpoint, TableEntry
from glint.errors import EngineError
from glint.native import abi
from glint.native.library import NativeEngine, choose_library, load_library, plan_engine
from tests.cpu.rank_engine import LAYOUTS, open_testing_engine, rank_model
from tests.cpu.small_engine import engine_options
from tests.cpu.testing_library import declare
from tests.reference.checkpoints import Family, Weights
from tests.reference.numpy_ops import expand_scale
from tests.reference.shapes import SCALE_KINDS

pytestmark = pytest.mark.sanitize

_DTYPES = {Dtype.F32: np.dtype("<f4"), Dtype.BF16: np.dtype("<u2"), Dtype.F8_E4M3: np.dtype("u1")}
NUM_EXPERTS = 16
TILES: dict[str, Any] = {
    "num_attention_heads": 8,
    "head_dim": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_shared_experts": 2,
}
MODELS: dict[str, tuple[Weights, Family, dict[str, Any]]] = {
    "channel": ("fp8_channel", "glm47", {}),
    "tensor": ("fp8_tensor", "air", {}),
    "bf16": ("bf16", "glm47", {"num_key_value_heads": 4}),
    "tied": ("fp8_channel", "tied", {"num_key_value_heads": 8}),
    "tiles": ("fp8_block", "glm47", TILES),
    "mtp": ("fp8_channel", "glm47", {"mtp": "with its own"}),
    "mtp bf16": ("bf16", "air", {"mtp": "with its own"}),
}


class NativeSlice(Structure):
    """TestSlice of native/testing/slices_abi.cpp."""

    _fields_ = [(name, c_int32) for name in ("rank", "role", "layer", "expert")]
    _fields_ += [(name, c_int64) for name in ("row_first", "rows", "col_first", "cols")]
    _fields_ += [("is_held", c_int32)]


@cache
def model(name: str) -> Checkpoint:
    """One of the models here, with 16 experts."""
    weights, family, shape = MODELS[name]
    return rank_model(weights, family, n_routed_experts=NUM_EXPERTS, num_experts_per_tok=4, **shape)


def tensors_of(checkpoint: Checkpoint) -> tuple[TableEntry, ...]:
    """All tensors, those of the MTP layer included."""
    return checkpoint.tensors + checkpoint.mtp_tensors


def options_of(checkpoint: Checkpoint, num_ranks: int, layout: ExpertLayout) -> dict[str, int]:
    """A small engine of so many ranks, which loads the MTP layer where there is one."""
    ranks = {"num_ranks": num_ranks, "row_slices": num_ranks, "expert_layout": LAYOUTS[layout]}
    sizes = {"num_pages": 4, "max_step_tokens": 8, "max_step_items": 2}
    return ranks | sizes | {"max_draft_tokens": int(bool(checkpoint.mtp_tensors))}


def check(status: int) -> None:
    """Fail with the library's words where a call did not work."""
    assert status == abi.STATUS_OK, declare("glint_testing_slices_error", c_char_p)().decode()


def native_slice(engine: NativeEngine, entry: TableEntry, rank: int) -> NativeSlice:
    """What the engine's rank holds of a tensor."""
    layer, expert = (-1 if value is None else value for value in (entry.layer, entry.expert))
    found = NativeSlice(rank=rank, role=entry.role, layer=layer, expert=expert)
    check(declare("glint_testing_rank_slice", c_int32, POINTER(abi.Engine), c_void_p)(engine._engine, byref(found)))
    return found


@cache
def read_tensor(name: str, index: int) -> NDArray[Any]:
    """A tensor [rows, cols] of the files, as it lies there."""
    checkpoint, entry = model(name), tensors_of(model(name))[index]
    dtype = _DTYPES[entry.dtype]
    path, count = checkpoint.files[entry.file_index].path, entry.rows * entry.cols
    return np.fromfile(path, dtype, count, offset=entry.file_offset).reshape(entry.rows, entry.cols)


def scales_of(name: str, entry: TableEntry) -> NDArray[np.float32]:
    """The scale of every element [rows, cols] of a weight."""
    for index, other in enumerate(tensors_of(model(name))):
        if other.part is Part.SCALE and (other.role, other.layer, other.expert) == entry[:1] + entry[2:4]:
            kind = SCALE_KINDS[MODELS[name][0]]
            stored = read_tensor(name, index)
            values = stored.reshape(1) if kind == "tensor" else stored
            return np.asarray(expand_scale(values, kind, entry.rows, entry.cols), np.float32)
    return np.ones((entry.rows, entry.cols), np.float32)


CASES = [
    (name, count, layout)
    for name, count, layout in itertools.product(MODELS, (1, 2, 4, 8), LAYOUTS)
    if name != "tiles" or count < 4 or (count, layout) == (4, "ep")
]


@pytest.mark.parametrize(("name", "num_ranks", "layout"), CASES)
def test_every_rank_holds_the_slices_of_the_placement(name: str, num_ranks: int, layout: ExpertLayout) -> None:
    checkpoint = model(name)
    with open_testing_engine(checkpoint, **options_of(checkpoint, num_ranks, layout)) as engine:
        for entry, rank in itertools.product(tensors_of(checkpoint), range(num_ranks)):
            if entry.part is not Part.WEIGHT or entry.cols == 1:
                continue
            expected = slice_of(entry, checkpoint.config, rank, num_ranks, layout)
            found = native_slice(engine, entry, rank)
            assert bool(found.is_held) == (expected is not None)
            if expected is not None:
                assert (found.row_first, found.rows, found.col_first, found.cols) == expected


@pytest.mark.parametrize(("name", "num_ranks", "layout"), [case for case in CASES if case[1] in (2, 4)])
def test_every_rank_reads_the_elements_of_its_slices(name: str, num_ranks: int, layout: ExpertLayout) -> None:
    """Elements, scales and biases of the slices of two layers, one of them with experts, are those of the files."""
    checkpoint = model(name)
    read = declare("glint_testing_rank_weight", c_int32, POINTER(abi.Engine), c_void_p, c_void_p, POINTER(c_float))
    read_bias = declare("glint_testing_rank_bias", c_int32, POINTER(abi.Engine), c_void_p, POINTER(c_float))
    num_read = 0
    with open_testing_engine(checkpoint, **options_of(checkpoint, num_ranks, layout)) as engine:
        for (index, entry), rank in itertools.product(enumerate(tensors_of(checkpoint)), range(num_ranks)):
            if entry.layer == 2 or entry.part is Part.SCALE or entry.role is Role.ROUTER:
                continue
            part = slice_of(entry, checkpoint.config, rank, num_ranks, layout)
            if part is None or (entry.part is Part.WEIGHT and entry.cols == 1):
                continue
            found = native_slice(engine, entry, rank)
            rows = slice(part.row_first, part.row_first + part.row_count)
            cols = slice(part.col_first, part.col_first + part.col_count)
            expected = read_tensor(name, index)[rows, cols]
            if entry.part is Part.BIAS:
                bias = np.empty(part.row_count, np.float32)
                check(read_bias(engine._engine, byref(found), bias.ctypes.data_as(POINTER(c_float))))
                widened = expected.astype(np.uint32) << 16
                np.testing.assert_array_equal(bias.view(np.uint32), widened[:, 0])
            else:
                elements = np.empty((part.row_count, part.col_count), expected.dtype)
                scales = np.empty(elements.shape, np.float32)
                pointers = elements.ctypes.data, scales.ctypes.data_as(POINTER(c_float))
                check(read(engine._engine, byref(found), *pointers))
                np.testing.assert_array_equal(elements, expected)
                np.testing.assert_array_equal(scales, scales_of(name, entry)[rows, cols])
            num_read += 1
    assert num_read > 25 * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_pages_hold_the_heads_of_the_placement(num_ranks: int) -> None:
    """Heads that several ranks keep are kept several times."""
    checkpoint = model("channel")
    options = engine_options(checkpoint, num_ranks=num_ranks, row_slices=num_ranks)
    plan = plan_engine(load_library(choose_library("cpu")), options)
    heads = sum(len(kv_heads_of(checkpoint.config, rank, num_ranks)) for rank in range(num_ranks))
    config = checkpoint.config
    assert heads == max(config.num_kv_heads, num_ranks)
    assert plan.bytes_per_page == options.page_tokens * heads * config.head_dim * config.num_layers * 2 * 2


SHAPES: list[dict[str, Any]] = [
    {},
    {"num_attention_heads": 12, "num_key_value_heads": 3},
    {"num_attention_heads": 6, "num_key_value_heads": 1},
    {"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 360},
    {"vocab_size": 263},
    {"intermediate_size": 90},
    {"moe_intermediate_size": 12},
    {"moe_intermediate_size": 13, "n_shared_experts": 8},
    {"n_routed_experts": 10},
    {"num_hidden_layers": 1, "intermediate_size": 36},
    {"num_hidden_layers": 2, "first_k_dense_replace": 0, "intermediate_size": 7},
]
TILE_SHAPES: list[dict[str, Any]] = [
    TILES,
    TILES | {"num_key_value_heads": 1, "head_dim": 64},
    TILES | {"num_key_value_heads": 2, "head_dim": 64},
    TILES | {"num_key_value_heads": 1, "head_dim": 16},
    TILES | {"intermediate_size": 384},
    TILES | {"moe_intermediate_size": 128, "n_shared_experts": 4},
    TILES | {"num_hidden_layers": 1},
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("weights", "shape"),
    [*(("fp8_channel", shape) for shape in SHAPES), *itertools.product(("fp8_block", "fp8_group"), TILE_SHAPES)],
    ids=str,
)
def test_both_sides_refuse_the_same(weights: Weights, shape: dict[str, Any], layout: ExpertLayout) -> None:
    checkpoint = rank_model(weights, **shape)
    library = load_library(choose_library("cpu"))
    for num_ranks in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16):
        options = engine_options(
            checkpoint, num_ranks=num_ranks, row_slices=num_ranks, expert_layout=LAYOUTS[layout], max_step_tokens=8
        )
        problems = find_split_problems(checkpoint.config, num_ranks, layout)
        if problems:
            with pytest.raises(EngineError, match=r"choose another (--tp|options\.num_ranks)"):
                plan_engine(library, options)
        else:
            assert plan_engine(library, options).bytes_per_page > 0
