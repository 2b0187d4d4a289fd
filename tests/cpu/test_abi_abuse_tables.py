"""Bad options, models, files and tensor tables to glint_init_engine: a status, a text that names it, no engine."""

import ctypes
import math
import platform
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.native import abi
from glint.native.library import choose_library, load_library
from tests.cpu.raw_engine import Handle
from tests.cpu.small_engine import engine_options, small_model

pytestmark = pytest.mark.sanitize

INVALID = abi.STATUS_INVALID_ARGUMENT
UNSUPPORTED = abi.STATUS_UNSUPPORTED
FILE = abi.STATUS_FILE
INT_MAX = 2**31 - 1
INT_MIN = -(2**31)
FOREIGN_KERNELS = abi.KERNELS_AVX2 if platform.machine() in ("aarch64", "arm64") else abi.KERNELS_NEON
POSITIONS = 2048


def init(options: Any, table: Any, count: int | None = None) -> tuple[int, str]:
    """Status and text of making an engine; one that was refused must leave the handle alone, a good one is freed."""
    library = load_library(choose_library("cpu"))
    handle = Handle()
    tensors = None if table is None else table.ctypes.data_as(ctypes.POINTER(abi.Tensor))
    given = (0 if table is None else len(table)) if count is None else count
    status = int(library.glint_init_engine(options, tensors, given, handle))
    text = str(library.glint_last_error().decode())
    assert bool(handle) == (status == abi.STATUS_OK)
    if handle:
        assert library.glint_free_engine(handle) == abi.STATUS_OK
    return status, text


def assert_refused(outcome: tuple[int, str], status: int, words: str) -> None:
    assert outcome[0] == status, outcome
    assert words in outcome[1], outcome


OPTION_FAULTS: list[tuple[str, int, int]] = [
    *(("kernels", value, INVALID) for value in (-1, 11, INT_MAX)),
    *(("kernels", value, UNSUPPORTED) for value in (FOREIGN_KERNELS, abi.KERNELS_PORTABLE, abi.KERNELS_HOPPER)),
    *(("local_experts", value, UNSUPPORTED) for value in (-1, 1, 7, INT_MAX)),
    *(("num_threads", value, INVALID) for value in (0, -1, 1025, INT_MAX)),
    *(("num_ranks", value, INVALID) for value in (0, -1, 3, 65, 1025)),
    *(("row_slices", value, INVALID) for value in (0, -1, 5, 65, INT_MIN)),
    *(("expert_layout", value, INVALID) for value in (-1, 2)),
    *(("page_tokens", value, INVALID) for value in (0, -1, 3, 12, 2048, INT_MAX)),
    *(("num_pages", value, INVALID) for value in (-1, INT_MIN, 2**26 + 1, INT_MAX)),
    *(("max_step_tokens", value, INVALID) for value in (0, -1, 2**17 + 1, INT_MAX)),
    *(("max_step_items", value, INVALID) for value in (0, -1, 2**14 + 1, INT_MAX)),
    *(("max_requests", value, INVALID) for value in (0, -1, 2**20 + 1, INT_MAX)),
    *(("max_context_tokens", value, INVALID) for value in (0, 1, -1, POSITIONS + 1, INT_MAX)),
]

MODEL_FAULTS: list[tuple[str, Any]] = [
    *(
        (name, value)
        for name in (
            "vocab_size",
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "rotary_dim",
            "dense_width",
            "expert_width",
            "shared_width",
            "num_experts",
            "experts_per_token",
            "max_positions",
            "mtp_vocab_size",
        )
        for value in (0, -1, INT_MIN, INT_MAX)
    ),
    *(("num_dense_layers", value) for value in (-1, 4, INT_MAX)),
    ("num_kv_heads", 3),
    ("rotary_dim", 7),
    ("experts_per_token", 9),
    *(("weight_scale_kind", value) for value in (-1, 4)),
    *(("input_group_size", value) for value in (-1, 1, 64, 128)),
    *(("has_qk_norm", value) for value in (-1, 2)),
    *(("has_attention_bias", value) for value in (-1, 2)),
    *(("normalise_weights", value) for value in (-1, 2)),
    *(("routed_scaling", value) for value in (math.nan, math.inf)),
    *(("norm_epsilon", value) for value in (math.nan, math.inf, 0.0, -1e-5)),
    *(("rope_theta", value) for value in (math.nan, math.inf, 0.0, 1.0, -1e4)),
]


def test_good_table_makes_an_engine() -> None:
    checkpoint = small_model()
    assert init(engine_options(checkpoint), checkpoint.tensor_array()) == (abi.STATUS_OK, "")


@pytest.mark.parametrize(("name", "value", "status"), OPTION_FAULTS)
def test_bad_option_is_refused(name: str, value: int, status: int) -> None:
    checkpoint = small_model()
    outcome = init(engine_options(checkpoint, **{name: value}), checkpoint.tensor_array())
    assert_refused(outcome, status, "kernels" if name == "kernels" else f"options.{name} is {value}")


@pytest.mark.parametrize(
    ("name", "value", "is_room"),
    [
        ("max_step_items", 3, False),
        ("max_step_items", 4, True),
        ("max_step_tokens", 3, False),
        ("max_step_tokens", 4, True),
    ],
)
def test_drafts_that_no_step_has_room_for_are_refused(name: str, value: int, is_room: bool) -> None:
    checkpoint = small_model("fp8_channel", "with copies")
    options = engine_options(checkpoint, max_draft_tokens=3, **{name: value})
    outcome = init(options, checkpoint.tensor_array(has_mtp=True))
    if is_room:
        assert outcome == (abi.STATUS_OK, "")
    else:
        assert_refused(outcome, INVALID, f"options.max_draft_tokens is 3 and options.{name} is {value}")


def test_an_mtp_embedding_of_fp8_is_refused() -> None:
    """Embedding rows are read as BF16: half the bytes of the table are behind them."""
    checkpoint = small_model("fp8_channel", "with its own")
    table = checkpoint.tensor_array(has_mtp=True)
    layer = checkpoint.config.num_layers
    of_layer = table["layer"] == layer
    head, scale = (
        int(np.flatnonzero(of_layer & (table["role"] == abi.ROLE_LM_HEAD) & (table["part"] == part))[0])
        for part in (abi.PART_WEIGHT, abi.PART_SCALE)
    )
    embedding = int(np.flatnonzero(of_layer & (table["role"] == abi.ROLE_EMBEDDING))[0])
    table[embedding] = table[head]
    table["role"][embedding] = abi.ROLE_EMBEDDING
    extra = table[scale : scale + 1].copy()
    extra["role"] = abi.ROLE_EMBEDDING
    outcome = init(engine_options(checkpoint, max_draft_tokens=1), np.append(table, extra))
    assert_refused(outcome, INVALID, f"the embedding of layer {layer} (role 1) has dtype {abi.DTYPE_F8_E4M3}")


@pytest.mark.parametrize(("name", "value"), MODEL_FAULTS)
def test_bad_model_is_refused(name: str, value: Any) -> None:
    checkpoint = small_model()
    options = engine_options(checkpoint)
    setattr(options.model.contents, name, value)
    status, text = init(options, checkpoint.tensor_array())
    assert status == INVALID, text
    assert name in text, text


@pytest.mark.parametrize(
    ("name", "change"),
    [("vocab_size", 1), ("hidden_size", 2), ("num_layers", 1), ("num_layers", -1), ("num_dense_layers", 1)]
    + [("num_heads", 2), ("head_dim", 2), ("dense_width", 4), ("expert_width", 4), ("shared_width", 4)]
    + [("num_experts", 1), ("num_experts", -1), ("has_qk_norm", -1), ("has_attention_bias", -1)]
    + [("weight_scale_kind", 1), ("weight_scale_kind", 2), ("weight_scale_kind", -1)],
)
def test_model_that_is_not_the_table_is_refused(name: str, change: int) -> None:
    checkpoint = small_model()
    options = engine_options(checkpoint)
    setattr(options.model.contents, name, getattr(options.model.contents, name) + change)
    status, text = init(options, checkpoint.tensor_array())
    assert status == INVALID
    assert "role" in text or "tensors of the table" in text


def test_null_pointers_are_refused() -> None:
    checkpoint = small_model()
    table = checkpoint.tensor_array()
    tensors = table.ctypes.data_as(ctypes.POINTER(abi.Tensor))
    library = load_library(choose_library("cpu"))
    assert library.glint_init_engine(engine_options(checkpoint), tensors, len(table), None) == INVALID
    assert "engine is null" in library.glint_last_error().decode()
    assert_refused(init(None, table), INVALID, "options is null")
    assert_refused(init(engine_options(checkpoint), None, len(table)), INVALID, "tensor table")
    for field in ("model", "files"):
        options = engine_options(checkpoint)
        setattr(options, field, None)
        assert_refused(init(options, table), INVALID, f"options.{field}")
    options = engine_options(checkpoint)
    options.files[0].path = None
    assert_refused(init(options, table), INVALID, "path")


@pytest.mark.parametrize("size", [0, 4, 2**32 - 1])
def test_structs_of_another_size_are_refused(size: int) -> None:
    checkpoint = small_model()
    table = checkpoint.tensor_array()
    options = engine_options(checkpoint)
    options.struct_bytes = size
    assert_refused(init(options, table), INVALID, f"options.struct_bytes is {size}")
    options = engine_options(checkpoint)
    options.model.contents.struct_bytes = size
    assert_refused(init(options, table), INVALID, f"options.model.struct_bytes is {size}")
    options = engine_options(checkpoint)
    options.files[0].struct_bytes = size
    assert_refused(init(options, table), INVALID, f"file.struct_bytes is {size}")
    table["struct_bytes"][3] = size
    assert_refused(init(engine_options(checkpoint), table), INVALID, f"tensor.struct_bytes is {size}")


@pytest.mark.parametrize("count", [0, -1, -(2**63), 2**32, 2**63 - 1])
def test_tensor_count_out_of_range_is_refused(count: int) -> None:
    checkpoint = small_model()
    assert_refused(init(engine_options(checkpoint), checkpoint.tensor_array(), count), INVALID, str(count))


@pytest.mark.parametrize("count", [0, -1, INT_MIN, INT_MAX])
def test_file_count_out_of_range_is_refused(count: int) -> None:
    checkpoint = small_model()
    options = engine_options(checkpoint)
    options.file_count = count
    assert_refused(init(options, checkpoint.tensor_array()), INVALID, str(count))


TENSOR_FAULTS: list[tuple[str, dict[str, int]]] = [
    *(("role", {"role": value}) for value in (0, -1, 22, INT_MAX)),
    *(("part", {"part": value}) for value in (-1, 3, INT_MIN)),
    *(("dtype", {"dtype": value}) for value in (0, 4, -1)),
    *(("layer", {"layer": value}) for value in (-2, 2**20, INT_MIN)),
    *(("expert", {"expert": value}) for value in (-2, 2**20, INT_MAX)),
    *(("file", {"file_index": value}) for value in (-1, 3, INT_MAX)),
    *(("shape", {"rows": value}) for value in (0, -1, 2**31, 2**62, -(2**63))),
    *(("shape", {"cols": value}) for value in (0, -1, 2**31, 2**63 - 1)),
    *(("bytes", {"byte_count": value}) for value in (0, 1, 2**64 - 1)),
    *(("ends behind", {"file_offset": value}) for value in (2**32, 2**63, 2**64 - 1, 2**64 - 64)),
    ("ends behind", {"rows": 2**30, "cols": 2**30, "dtype": abi.DTYPE_F8_E4M3, "byte_count": 2**60}),
]


@pytest.mark.parametrize(("words", "changes"), TENSOR_FAULTS, ids=[str(changes) for _, changes in TENSOR_FAULTS])
@pytest.mark.parametrize("index", [0, 20, -1])
def test_bad_tensor_is_refused(words: str, changes: dict[str, int], index: int) -> None:
    checkpoint = small_model()
    table = checkpoint.tensor_array()
    for name, value in changes.items():
        table[name][index] = value
    status, text = init(engine_options(checkpoint), table)
    assert status == INVALID, text
    assert words in text
    assert f"tensor {index % len(table)} " in text, text


@pytest.mark.parametrize("too_far", [0, 1])
def test_a_tensor_ends_with_its_file_at_the_latest(too_far: int) -> None:
    checkpoint = small_model()
    table = checkpoint.tensor_array()
    index = int(np.flatnonzero(table["role"] == abi.ROLE_FINAL_NORM)[0])
    end = checkpoint.files[int(table["file_index"][index])].byte_count
    table["file_offset"][index] = end - int(table["byte_count"][index]) + too_far
    outcome = init(engine_options(checkpoint), table)
    if too_far:
        assert_refused(outcome, INVALID, f"tensor {index} ends behind the end of file")
    else:
        assert outcome[0] == abi.STATUS_OK, outcome[1]


def test_tensor_missing_or_twice_is_refused() -> None:
    checkpoint = small_model()
    table = checkpoint.tensor_array()
    for index in range(len(table)):
        gone = table[index]
        outcome = init(engine_options(checkpoint), np.delete(table, index))
        assert_refused(outcome, INVALID, f"lacks role {gone['role']}, part {gone['part']}, layer {gone['layer']}")
        twice = np.insert(table, 0, gone)
        assert_refused(init(engine_options(checkpoint), twice), INVALID, "occurs twice")


def test_tensor_without_a_place_is_refused() -> None:
    checkpoint = small_model()
    for name, value in (("layer", 3), ("expert", 8), ("part", abi.PART_BIAS)):
        extra = checkpoint.tensor_array()
        gate = np.flatnonzero((extra["role"] == abi.ROLE_GATE) & (extra["layer"] == 2) & (extra["expert"] == 7))[0]
        row = extra[gate : gate + 1].copy()
        row[name] = value
        assert_refused(init(engine_options(checkpoint), np.append(extra, row)), INVALID, "1 tensors of the table")


@pytest.mark.parametrize("role", range(abi.ROLE_EMBEDDING, abi.ROLE_SHARED_DOWN + 1))
def test_tensor_of_another_dtype_or_shape_is_refused(role: int) -> None:
    checkpoint = small_model()
    table = checkpoint.tensor_array()
    index = int(np.flatnonzero((table["role"] == role) & (table["part"] == abi.PART_WEIGHT))[0])
    rows, cols, dtype = (int(table[name][index]) for name in ("rows", "cols", "dtype"))
    turned = table.copy()
    turned["rows"][index], turned["cols"][index] = (cols, rows) if rows != cols else (rows // 2, cols * 2)
    assert_refused(init(engine_options(checkpoint), turned), INVALID, f"role {role}")
    bytes_of = {abi.DTYPE_F32: 4, abi.DTYPE_BF16: 2, abi.DTYPE_F8_E4M3: 1}
    other = abi.DTYPE_F8_E4M3 if dtype == abi.DTYPE_BF16 else abi.DTYPE_BF16
    table["dtype"][index] = other
    table["byte_count"][index] = rows * cols * bytes_of[other]
    table["file_offset"][index] = 0
    assert_refused(init(engine_options(checkpoint), table), INVALID, f"role {role}")


def copy_model(folder: Path) -> Checkpoint:
    """A copy of the small model whose files a test may spoil."""
    return open_checkpoint(Path(shutil.copytree(small_model().folder, folder / "model")))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def turn_into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [Path.unlink, truncate, lengthen, turn_into_folder], ids=lambda spoil: spoil.__name__)
def test_file_that_changed_is_refused(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    checkpoint = copy_model(tmp_path)
    for file in checkpoint.files:
        assert init(engine_options(checkpoint), checkpoint.tensor_array()) == (abi.STATUS_OK, "")
        kept = file.path.read_bytes()
        spoil(file.path)
        outcome = init(engine_options(checkpoint), checkpoint.tensor_array())
        assert_refused(outcome, FILE, file.path.name)
        if file.path.is_dir():
            file.path.rmdir()
        file.path.write_bytes(kept)


def test_file_size_that_is_not_the_tables_is_refused() -> None:
    checkpoint = small_model()
    for byte_count in (0, 1, 2**63, 2**64 - 1):
        options = engine_options(checkpoint)
        options.files[0].byte_count = byte_count
        assert_refused(init(options, checkpoint.tensor_array()), FILE, str(byte_count))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weight_scale_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    checkpoint = copy_model(tmp_path)
    entry = next(tensor for tensor in checkpoint.tensors if tensor.part == abi.PART_SCALE)
    with checkpoint.files[entry.file_index].path.open("r+b") as file:
        file.seek(entry.file_offset + 8)
        file.write(np.float32(value).tobytes())
    outcome = init(engine_options(checkpoint), checkpoint.tensor_array())
    assert_refused(outcome, INVALID, f"scale of role {int(entry.role)}, layer {entry.layer}")


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_nan_in_a_weight_is_refused(tmp_path: Path, code: int) -> None:
    checkpoint = copy_model(tmp_path)
    entry = next(tensor for tensor in checkpoint.tensors if tensor.dtype == abi.DTYPE_F8_E4M3)
    with checkpoint.files[entry.file_index].path.open("r+b") as file:
        file.seek(entry.file_offset + entry.byte_count - 1)
        file.write(bytes([code]))
    outcome = init(engine_options(checkpoint), checkpoint.tensor_array())
    assert_refused(outcome, INVALID, f"weight of role {int(entry.role)}, layer {entry.layer}")


def test_tensors_may_start_anywhere(tmp_path: Path) -> None:
    checkpoint = copy_model(tmp_path)
    entries = []
    data = bytearray(b"\0")
    for entry in checkpoint.tensors:
        source = checkpoint.files[entry.file_index].path
        piece = source.read_bytes()[entry.file_offset : entry.file_offset + entry.byte_count]
        entries.append(entry._replace(file_index=0, file_offset=len(data)))
        data += piece + b"\0" * (len(piece) % 2)
    path = tmp_path / "odd.bin"
    path.write_bytes(data)
    file = replace(checkpoint.files[0], path=path, byte_count=len(data))
    odd = replace(checkpoint, files=(file,), tensors=tuple(entries))
    assert init(engine_options(odd), odd.tensor_array()) == (abi.STATUS_OK, "")
