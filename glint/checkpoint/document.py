"""Strict JSON objects, as checkpoint files hold them."""

import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from glint.errors import CheckpointError

MAX_DOCUMENT_BYTES = 100_000_000


class Defect(StrEnum):
    """The ways in which a JSON document or a safetensors file can be malformed."""

    NOT_READABLE = "NotReadable"
    NOT_UTF8 = "NotUtf8"
    NOT_JSON = "NotJson"
    NOT_AN_OBJECT = "NotAnObject"
    DUPLICATE_KEY = "DuplicateKey"
    TOO_LARGE = "TooLarge"
    HEADER_TOO_SMALL = "HeaderTooSmall"
    HEADER_TOO_LARGE = "HeaderTooLarge"
    HEADER_PAST_END = "InvalidHeaderLength"
    HEADER_START = "InvalidHeaderStart"
    HEADER_SCHEMA = "InvalidHeaderSchema"
    UNKNOWN_DTYPE = "UnknownDtype"
    OFFSET = "InvalidOffset"
    SIZE_DIFFERS = "TensorInvalidInfo"
    OVERFLOW = "ValidationOverflow"
    MISALIGNED = "MisalignedSlice"
    INCOMPLETE = "MetadataIncompleteBuffer"


class FormatError(CheckpointError):
    """One file is malformed; `defect` says in which way."""

    def __init__(self, source: str, defect: Defect, detail: str) -> None:
        super().__init__(f"{source}: {defect}: {detail}")
        self.source = source
        self.defect = defect
        self.detail = detail


class _DuplicateKey(Exception):
    """Two members of one JSON object have the same key."""


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return members


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON value")


def parse_object(data: bytes, source: str, parse_integer: Callable[[str], int] = int) -> dict[str, Any]:
    """Parse a JSON object strictly.

    Refuses with FormatError what is not UTF-8, NaN and infinities, duplicate keys at any depth, nesting beyond the
    interpreter's limit, lone surrogates, and anything that is not an object. `source` names the file in the error.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(
            source, Defect.NOT_UTF8, f"byte {error.start} is not UTF-8; download the file again"
        ) from None
    try:
        document = json.loads(
            text, object_pairs_hook=_unique_members, parse_constant=_refuse_constant, parse_int=parse_integer
        )
        if b"\\u" in data:
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except _DuplicateKey as error:
        detail = f"the key {str(error)!r} occurs twice in one object; remove one of them"
        raise FormatError(source, Defect.DUPLICATE_KEY, detail) from None
    except RecursionError:
        raise FormatError(source, Defect.NOT_JSON, "values are nested too deeply; write the file anew") from None
    except ValueError as error:
        raise FormatError(source, Defect.NOT_JSON, f"{error}; download or write the file anew") from None
    if not isinstance(document, dict):
        detail = f"a JSON object is needed, not {type(document).__name__}"
        raise FormatError(source, Defect.NOT_AN_OBJECT, detail)
    return document


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a regular file of at most 100 MB; raise FormatError when that is impossible."""
    try:
        if not path.is_file():
            raise FormatError(path.name, Defect.NOT_READABLE, f"{path} is missing or not a regular file")
        size = path.stat().st_size
        if size > MAX_DOCUMENT_BYTES:
            detail = f"{size} bytes, at most {MAX_DOCUMENT_BYTES} are read"
            raise FormatError(path.name, Defect.TOO_LARGE, detail)
        data = path.read_bytes()
    except OSError as error:
        raise FormatError(path.name, Defect.NOT_READABLE, f"{error}; check the file and its permissions") from None
    return parse_object(data, path.name)
