"""Reads GGUF files: metadata, tensor descriptions, and weights dequantised to float32."""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from glint.errors import CheckpointError

Scalar = bool | int | float | str
Value = Scalar | list[Scalar]

_VERSION: Final = 3
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_STRING_TYPE: Final = 8
_ARRAY_TYPE: Final = 9
_BOOL_TYPE: Final = 7
_NUMBER_FORMATS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<B",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True)
class Encoding:
    """How a tensor's values lie in the file: `group_values` values share `group_bytes` bytes."""

    name: str
    group_values: int
    group_bytes: int


_ENCODINGS: Final = {0: Encoding("F32", 1, 4), 3: Encoding("Q4_1", 32, 20), 8: Encoding("Q8_0", 32, 34)}
_Q4_1_GROUP: Final = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("quants", "u1", 16)])
_Q8_0_GROUP: Final = np.dtype([("scale", "<f2"), ("quants", "i1", 32)])


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file: row-major shape (outermost first) and its byte range in the file."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    begin: int
    end: int


class GgufFile:
    """A mapped GGUF file of version 3.

    Promises that every length and offset was checked against the file before use, that metadata keys and tensor
    names are unique, and that `read` returns float32 values in the tensor's row-major shape. Anything else is a
    CheckpointError that names the file and the fault. `bytes_read` counts the tensor bytes that `read` has gone
    through, of `tensor_bytes` in all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self.bytes_read = 0
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be mapped ({error}); bring a readable GGUF file") from error
        self._position = 0
        try:
            self._read_header()
        except CheckpointError:
            self.close()
            raise

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file; arrays from `read` stay valid, as they are copies."""
        self._map.close()

    @property
    def tensor_bytes(self) -> int:
        """The length of all tensors in the file."""
        return sum(tensor.end - tensor.begin for tensor in self.tensors.values())

    def read(self, name: str) -> NDArray[np.float32]:
        """Returns the values of tensor `name` as float32 in its row-major shape."""
        if name not in self.tensors:
            raise self._fault(f"has no tensor {name!r}")
        tensor = self.tensors[name]
        raw = self._map[tensor.begin : tensor.end]
        self.bytes_read += len(raw)
        return _dequantise(raw, tensor.encoding).reshape(tensor.shape)

    def text(self, key: str) -> str:
        """Returns the string stored under `key`."""
        value = self._value(key)
        if not isinstance(value, str):
            raise self._fault(f"{key} is {value!r}, a string is needed")
        return value

    def integer(self, key: str) -> int:
        """Returns the integer stored under `key`."""
        value = self._value(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._fault(f"{key} is {value!r}, an integer is needed")
        return value

    def real(self, key: str) -> float:
        """Returns the shortest decimal that rounds to the float32 stored under `key`."""
        value = self._value(key)
        if not isinstance(value, float):
            raise self._fault(f"{key} is {value!r}, a floating-point number is needed")
        return float(str(np.float32(value)))

    def texts(self, key: str) -> list[str]:
        """Returns the list of strings stored under `key`."""
        value = self._value(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._fault(f"{key} is not a list of strings")
        return [str(item) for item in value]

    def integers(self, key: str) -> list[int]:
        """Returns the list of integers stored under `key`."""
        value = self._value(key)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._fault(f"{key} is not a list of integers")
        return [int(item) for item in value]

    def _fault(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")

    def _value(self, key: str) -> Value:
        if key not in self.metadata:
            raise self._fault(f"has no metadata {key!r}")
        return self.metadata[key]

    def _read_header(self) -> None:
        magic = self._take(4)
        if magic != b"GGUF":
            raise self._fault(f"starts with {magic!r}, not with b'GGUF'")
        version = self._number("<I")
        if version != _VERSION:
            raise self._fault(f"has GGUF version {version}, only version {_VERSION} is read")
        num_tensors = int(self._number("<Q"))
        num_keys = int(self._number("<Q"))
        for _ in range(num_keys):
            key = self._string()
            if key in self.metadata:
                raise self._fault(f"has metadata {key!r} twice")
            self.metadata[key] = self._metadata_value(key)
        described = [self._tensor_description() for _ in range(num_tensors)]
        self._place_tensors(described)

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self._map) - self._position:
            raise self._fault(f"ends inside its header: {num_bytes} bytes wanted at {self._position}")
        taken = self._map[self._position : self._position + num_bytes]
        self._position += num_bytes
        return taken

    def _number(self, number_format: str) -> int | float:
        number: int | float = struct.unpack(number_format, self._take(struct.calcsize(number_format)))[0]
        return number

    def _string(self) -> str:
        raw = self._take(int(self._number("<Q")))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._fault(f"has a string before byte {self._position} that is not UTF-8") from error

    def _scalar(self, value_type: int, key: str) -> Scalar:
        if value_type == _STRING_TYPE:
            return self._string()
        if value_type not in _NUMBER_FORMATS:
            raise self._fault(f"metadata {key!r} has the unknown value type {value_type}")
        number = self._number(_NUMBER_FORMATS[value_type])
        if value_type != _BOOL_TYPE:
            return number
        if number not in (0, 1):
            raise self._fault(f"metadata {key!r} is the boolean {number}, not 0 or 1")
        return bool(number)

    def _metadata_value(self, key: str) -> Value:
        value_type = int(self._number("<I"))
        if value_type != _ARRAY_TYPE:
            return self._scalar(value_type, key)
        item_type = int(self._number("<I"))
        num_items = int(self._number("<Q"))
        if num_items > len(self._map) - self._position:
            raise self._fault(f"metadata {key!r} claims {num_items} items, more than the file has bytes")
        return [self._scalar(item_type, key) for _ in range(num_items)]

    def _tensor_description(self) -> tuple[str, tuple[int, ...], Encoding, int]:
        name = self._string()
        num_dimensions = int(self._number("<I"))
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._fault(f"tensor {name!r} has {num_dimensions} dimensions, 1 to {_MAX_DIMENSIONS} are read")
        shape = tuple(int(self._number("<Q")) for _ in range(num_dimensions))[::-1]
        kind = int(self._number("<I"))
        offset = int(self._number("<Q"))
        if kind not in _ENCODINGS:
            known = ", ".join(encoding.name for encoding in _ENCODINGS.values())
            raise self._fault(f"tensor {name!r} has the encoding number {kind}, only {known} are read")
        encoding = _ENCODINGS[kind]
        if 0 in shape or shape[-1] % encoding.group_values != 0:
            raise self._fault(f"tensor {name!r} has shape {shape}, which {encoding.name} cannot hold")
        return name, shape, encoding, offset

    def _place_tensors(self, described: list[tuple[str, tuple[int, ...], Encoding, int]]) -> None:
        alignment = _DEFAULT_ALIGNMENT
        if "general.alignment" in self.metadata:
            alignment = self.integer("general.alignment")
        if alignment <= 0:
            raise self._fault(f"general.alignment is {alignment}, a positive number is needed")
        data_begin = -(-self._position // alignment) * alignment
        for name, shape, encoding, offset in described:
            num_values = 1
            for size in shape:
                num_values *= size
            begin = data_begin + offset
            end = begin + num_values // encoding.group_values * encoding.group_bytes
            if name in self.tensors:
                raise self._fault(f"has tensor {name!r} twice")
            if offset % alignment != 0 or end > len(self._map):
                raise self._fault(
                    f"tensor {name!r} lies at bytes {begin} to {end}; the file has {len(self._map)} bytes "
                    f"and wants offsets in steps of {alignment}"
                )
            self.tensors[name] = GgufTensor(name, shape, encoding, begin, end)


def _dequantise(raw: bytes, encoding: Encoding) -> NDArray[np.float32]:
    if encoding.name == "F32":
        return np.frombuffer(raw, "<f4").astype(np.float32)
    if encoding.name == "Q8_0":
        groups = np.frombuffer(raw, _Q8_0_GROUP)
        return (groups["quants"] * groups["scale"].astype(np.float32)[:, None]).astype(np.float32, copy=False)
    groups = np.frombuffer(raw, _Q4_1_GROUP)
    quants = np.concatenate([groups["quants"] & 15, groups["quants"] >> 4], axis=1)
    return quants * groups["scale"].astype(np.float32)[:, None] + groups["minimum"].astype(np.float32)[:, None]
