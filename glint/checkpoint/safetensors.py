"""Strict reader of safetensors headers; the data area is never read."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from glint.checkpoint.document import Defect, FormatError, parse_object

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
MAX_COUNT = 2**64 - 1
METADATA_KEY = "__metadata__"
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


class TensorInfo(NamedTuple):
    """One tensor of a header; begin and end count bytes from the start of the data area."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A checked safetensors header.

    The tensors cover the data area, bytes `data_start` to `file_bytes`, without holes or overlaps, and every length
    is what dtype and shape imply.
    """

    file_bytes: int
    data_start: int
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file; raise FormatError, naming the defect, if it is malformed."""
    source = path.name
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FormatError(source, Defect.NOT_READABLE, f"{path} is not a regular file")
        with path.open("rb", buffering=0) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = _header_length(file.read(LENGTH_BYTES), file_bytes, source)
            data = file.read(header_bytes)
    except OSError as error:
        raise FormatError(source, Defect.NOT_READABLE, f"{error}; check the file and its permissions") from None
    if len(data) != header_bytes:
        raise FormatError(source, Defect.HEADER_PAST_END, "the file shrank while it was read; copy it again")
    return _parse_header(data, file_bytes, source)


def _header_length(prefix: bytes, file_bytes: int, source: str) -> int:
    if len(prefix) < LENGTH_BYTES:
        detail = f"{file_bytes} bytes cannot hold a header length; download the file again"
        raise FormatError(source, Defect.HEADER_TOO_SMALL, detail)
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES:
        detail = f"the header claims {header_bytes} bytes, at most {MAX_HEADER_BYTES} are read; is it safetensors?"
        raise FormatError(source, Defect.HEADER_TOO_LARGE, detail)
    if LENGTH_BYTES + header_bytes > file_bytes:
        detail = f"the header claims {header_bytes} bytes, the file has {file_bytes}; download the file again"
        raise FormatError(source, Defect.HEADER_PAST_END, detail)
    return header_bytes


def _parse_header(data: bytes, file_bytes: int, source: str) -> Header:
    if not data.startswith(b"{"):
        detail = f"the header starts with {data[:1]!r}, '{{' is needed; is it safetensors?"
        raise FormatError(source, Defect.HEADER_START, detail)
    document = parse_object(data, source, _parse_count)
    metadata = _read_metadata(document.pop(METADATA_KEY, {}), source)
    tensors = {name: _read_tensor(name, fields, source) for name, fields in document.items()}
    data_start = LENGTH_BYTES + len(data)
    _check_coverage(tensors, file_bytes - data_start, source)
    return Header(file_bytes, data_start, metadata, tensors)


def _parse_count(text: str) -> int:
    if text[0] == "-":
        raise ValueError(f"{text} where a count or an offset is needed")
    return int(text)


def _read_metadata(section: Any, source: str) -> dict[str, str]:
    if not isinstance(section, dict) or not all(isinstance(value, str) for value in section.values()):
        detail = f"{METADATA_KEY} must map strings to strings; write the file anew"
        raise FormatError(source, Defect.HEADER_SCHEMA, detail)
    return section


def _read_tensor(name: str, fields: Any, source: str) -> TensorInfo:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        detail = f"tensor {name!r} needs exactly dtype, shape and data_offsets"
        raise FormatError(source, Defect.HEADER_SCHEMA, detail)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FormatError(source, Defect.UNKNOWN_DTYPE, f"tensor {name!r} has dtype {dtype!r}")
    if not _are_counts(shape):
        raise FormatError(source, Defect.HEADER_SCHEMA, f"tensor {name!r} has shape {shape!r}")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise FormatError(source, Defect.HEADER_SCHEMA, f"tensor {name!r} has data_offsets {offsets!r}")
    begin, end = offsets
    if end < begin:
        raise FormatError(source, Defect.OFFSET, f"tensor {name!r} ends at {end}, before its begin {begin}")
    _check_size(name, dtype, shape, end - begin, source)
    return TensorInfo(dtype, tuple(shape), begin, end)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= MAX_COUNT for value in values)


def _check_size(name: str, dtype: str, shape: list[int], byte_count: int, source: str) -> None:
    bits = 1
    for size in (*shape, DTYPE_BITS[dtype]):
        bits *= size
        if bits > MAX_COUNT:
            raise FormatError(source, Defect.OVERFLOW, f"tensor {name!r} of shape {shape} is too large to count")
    if bits % 8:
        detail = f"tensor {name!r} of {dtype} and shape {shape} does not fill whole bytes"
        raise FormatError(source, Defect.MISALIGNED, detail)
    if bits // 8 != byte_count:
        detail = f"tensor {name!r} of {dtype} and shape {shape} needs {bits // 8} bytes, its offsets give {byte_count}"
        raise FormatError(source, Defect.SIZE_DIFFERS, detail)


def _check_coverage(tensors: dict[str, TensorInfo], data_bytes: int, source: str) -> None:
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if info.begin != position:
            kind = "overlaps the tensor before it" if info.begin < position else "leaves a gap"
            detail = f"tensor {name!r} begins at {info.begin}, not at {position}: it {kind}; write the file anew"
            raise FormatError(source, Defect.OFFSET, detail)
        position = info.end
    if position != data_bytes:
        kind = "is cut off; download it again" if position > data_bytes else "has bytes that belong to no tensor"
        detail = f"the tensors end at {position}, the data area at {data_bytes}: the file {kind}"
        raise FormatError(source, Defect.INCOMPLETE, detail)
