"""Headers that must be refused, each beside the verdict of the official loader, and headers that must be read."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save_file

from glint.checkpoint.document import Defect, FormatError
from glint.checkpoint.safetensors import DTYPE_BITS, read_header
from glint.errors import CheckpointError, GlintError
from tests.pure.checkpoint_files import write_raw


def tensor(shape: str, begin: int, end: int, dtype: str = "F32") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'


def header(**tensors: str) -> bytes:
    return ("{" + ",".join(f'"{name}":{text}' for name, text in tensors.items()) + "}").encode()


@dataclass(frozen=True)
class Malformed:
    """A header that must be refused; `official` is part of the official loader's answer, None where it accepts."""

    name: str
    header: bytes
    data_bytes: int
    defect: Defect
    official: str | None
    header_length: int | None = None


GOOD = header(a=tensor("[1]", 0, 4))
NESTED = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
SAME_BEGIN = header(a=tensor("[1]", 0, 4), b=tensor("[0]", 0, 0))
LARGEST_COUNT = header(a=tensor(f"[{2**64 - 1},0]", 4, 4), b=tensor("[1]", 0, 4), c=tensor("[0]", 0, 0))
SCHEMA = "invalid JSON in header"
MALFORMED = [
    Malformed("length_bomb", GOOD, 4, Defect.HEADER_TOO_LARGE, "header too large", 100_000_001),
    Malformed("length_overflow", GOOD, 4, Defect.HEADER_TOO_LARGE, "header too large", 2**64 - 1),
    Malformed("longest_length", GOOD, 4, Defect.HEADER_PAST_END, "invalid header length", 100_000_000),
    Malformed("past_the_end", GOOD, 4, Defect.HEADER_PAST_END, "invalid header length", len(GOOD) + 5),
    Malformed("empty", b"", 0, Defect.HEADER_START, SCHEMA),
    Malformed("not_utf8", b'{"\xff":1}', 0, Defect.NOT_UTF8, "UTF-8"),
    Malformed("not_json", b'{"a":', 0, Defect.NOT_JSON, SCHEMA),
    Malformed("two_values", b"{}{}", 0, Defect.NOT_JSON, SCHEMA),
    Malformed("not_an_object", b"[]", 0, Defect.HEADER_START, SCHEMA),
    Malformed("leading_space", b" " + GOOD, 4, Defect.HEADER_START, None),
    Malformed("deep_nesting", NESTED, 0, Defect.NOT_JSON, SCHEMA),
    Malformed("nan", header(a=tensor("[NaN]", 0, 4)), 4, Defect.NOT_JSON, SCHEMA),
    Malformed("infinity", header(a=tensor("[1e400]", 0, 4)), 4, Defect.HEADER_SCHEMA, SCHEMA),
    Malformed("lone_surrogate", b'{"\\ud800":' + tensor("[1]", 0, 4).encode() + b"}", 4, Defect.NOT_JSON, SCHEMA),
    Malformed("huge_number", header(a=tensor("[" + "9" * 5000 + "]", 0, 4)), 4, Defect.NOT_JSON, SCHEMA),
    Malformed("missing_field", b'{"a":{"dtype":"F32","shape":[1]}}', 4, Defect.HEADER_SCHEMA, SCHEMA),
    Malformed("not_a_tensor", b'{"a":1}', 0, Defect.HEADER_SCHEMA, SCHEMA),
    Malformed("extra_field", GOOD[:-2] + b',"x":1}}', 4, Defect.HEADER_SCHEMA, None),
    Malformed("unknown_dtype", header(a=tensor("[1]", 0, 4, "F33")), 4, Defect.UNKNOWN_DTYPE, SCHEMA),
    Malformed("negative_shape", header(a=tensor("[-1]", 0, 4)), 4, Defect.NOT_JSON, SCHEMA),
    Malformed("negative_zero", header(a=tensor("[-0]", 0, 0)), 0, Defect.NOT_JSON, SCHEMA),
    Malformed("float_shape", header(a=tensor("[1.0]", 0, 4)), 4, Defect.HEADER_SCHEMA, SCHEMA),
    Malformed("bool_shape", header(a=tensor("[true]", 0, 4)), 4, Defect.HEADER_SCHEMA, SCHEMA),
    Malformed("string_shape", header(a=tensor('["1"]', 0, 4)), 4, Defect.HEADER_SCHEMA, SCHEMA),
    Malformed("scalar_shape", header(a=tensor("1", 0, 4)), 4, Defect.HEADER_SCHEMA, SCHEMA),
    Malformed("three_offsets", GOOD.replace(b"[0,4]", b"[0,4,4]"), 4, Defect.HEADER_SCHEMA, SCHEMA),
    Malformed("duplicate_tensor", GOOD[:-1] + b"," + GOOD[1:], 4, Defect.DUPLICATE_KEY, None),
    Malformed(
        "duplicate_field", GOOD.replace(b'"shape":[1]', b'"shape":[1],"shape":[1]'), 4, Defect.DUPLICATE_KEY, SCHEMA
    ),
    Malformed("metadata_number", b'{"__metadata__":{"a":1}}', 0, Defect.HEADER_SCHEMA, SCHEMA),
    Malformed("metadata_null", b'{"__metadata__":null}', 0, Defect.HEADER_SCHEMA, None),
    Malformed("overlap", header(a=tensor("[2]", 0, 8), b=tensor("[2]", 4, 12)), 12, Defect.OFFSET, "offset"),
    Malformed("same_bytes", header(a=tensor("[1]", 0, 4), b=tensor("[1]", 0, 4)), 4, Defect.OFFSET, "offset"),
    Malformed("gap", header(a=tensor("[1]", 0, 4), b=tensor("[1]", 8, 12)), 12, Defect.OFFSET, "offset"),
    Malformed("first_not_at_zero", header(a=tensor("[1]", 4, 8)), 8, Defect.OFFSET, "offset"),
    Malformed("end_before_begin", header(a=tensor("[1]", 4, 0)), 4, Defect.OFFSET, "offset"),
    Malformed("size_differs", header(a=tensor("[2]", 0, 4)), 4, Defect.SIZE_DIFFERS, "invalid shape"),
    Malformed("shape_overflow", header(a=tensor(f"[{2**63},4]", 0, 4)), 4, Defect.OVERFLOW, "overflow"),
    Malformed("bits_overflow", header(a=tensor(f"[{2**62}]", 0, 4)), 4, Defect.OVERFLOW, "overflow"),
    Malformed("overflow_then_zero", header(a=tensor(f"[{2**63},4,0]", 0, 0)), 0, Defect.OVERFLOW, "overflow"),
    Malformed("size_beyond_64_bits", header(a=tensor(f"[0,{2**64}]", 0, 0)), 0, Defect.HEADER_SCHEMA, SCHEMA),
    Malformed("half_a_byte", header(a=tensor("[1]", 0, 1, "F4")), 1, Defect.MISALIGNED, "byte boundary"),
    Malformed("trailing_data", GOOD, 5, Defect.INCOMPLETE, "incomplete metadata"),
    Malformed("truncated_data", GOOD, 3, Defect.INCOMPLETE, "incomplete metadata"),
]


@pytest.mark.parametrize("case", MALFORMED, ids=lambda case: case.name)
def test_a_malformed_header_is_refused_by_name(case: Malformed, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_raw(path, case.header, case.data_bytes, case.header_length)
    with pytest.raises(FormatError) as refusal:
        read_header(path)
    assert refusal.value.defect is case.defect
    assert refusal.value.problems[0].startswith(f"weights.safetensors: {case.defect}: ")
    if case.official is None:
        deserialize(path.read_bytes())
    else:
        with pytest.raises(SafetensorError, match=case.official):
            deserialize(path.read_bytes())


@pytest.mark.parametrize("length", range(8))
def test_a_file_without_a_length_is_refused(length: int, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"\0" * length)
    with pytest.raises(FormatError) as refusal:
        read_header(path)
    assert refusal.value.defect is Defect.HEADER_TOO_SMALL
    with pytest.raises(SafetensorError, match="header too small"):
        deserialize(path.read_bytes())


def test_a_missing_file_a_folder_and_a_pipe_are_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    for path in (tmp_path / "missing.safetensors", tmp_path, pipe):
        with pytest.raises(FormatError) as refusal:
            read_header(path)
        assert refusal.value.defect is Defect.NOT_READABLE


def test_a_file_of_the_official_writer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    arrays = {
        "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
        "bytes": np.arange(5, dtype=np.uint8),
        "scalar": np.array(7, dtype=np.int64),
        "nothing": np.zeros((0, 3), dtype=np.float16),
        'name with "quotes" and é': np.ones(2, dtype=np.int16),
    }
    save_file(arrays, path, metadata={"format": "np"})
    found = read_header(path)
    data = path.read_bytes()
    assert found.metadata == {"format": "np"}
    assert found.file_bytes == len(data)
    assert found.tensors.keys() == arrays.keys()
    with safe_open(path, "np") as official:
        for name, info in found.tensors.items():
            part = official.get_slice(name)
            assert list(info.shape) == part.get_shape()
            assert info.dtype == part.get_dtype()
            assert data[found.data_start + info.begin : found.data_start + info.end] == arrays[name].tobytes()


def test_a_header_without_tensors_is_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_raw(path, b"{}   \n", 0)
    assert read_header(path).tensors == {}
    deserialize(path.read_bytes())


@pytest.mark.parametrize("text", [SAME_BEGIN, LARGEST_COUNT], ids=["same_begin", "largest_count"])
def test_tensors_without_bytes_are_read_wherever_they_lie(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    write_raw(path, text, 4)
    found = {name: (info.dtype, list(info.shape)) for name, info in read_header(path).tensors.items()}
    assert found == {name: (info["dtype"], info["shape"]) for name, info in deserialize(path.read_bytes())}


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_has_the_size_that_the_official_loader_gives_it(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    for byte_count in range(1, 66):
        content = {"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, byte_count]}}
        write_raw(path, json.dumps(content).encode(), byte_count)
        verdicts = []
        for read in (lambda: read_header(path), lambda: deserialize(path.read_bytes())):
            try:
                read()
                verdicts.append(True)
            except (FormatError, SafetensorError):
                verdicts.append(False)
        assert verdicts[0] is verdicts[1] is (byte_count == DTYPE_BITS[dtype])


def test_an_error_prints_every_problem_on_its_own_line() -> None:
    error = CheckpointError("first", "second")
    assert isinstance(error, GlintError)
    assert error.problems == ("first", "second")
    assert str(error) == "first\nsecond"
