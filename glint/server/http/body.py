"""Reads a JSON body from an untrusted client: limits its bytes, depth and time, then checks its type."""

import asyncio
import re
from typing import TypeVar

import msgspec
import numpy as np
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from glint.server.http.allowed_values import allowed_values
from glint.server.http.problems import Problem
from glint.server.limits import Limits

MAX_SHOWN_CHARS = 80
MAX_ERROR_CHARS = 1000
MAX_OUTER_STRINGS = 1024

_CLOSE = {"Connection": "close"}
_JSON_TYPE = re.compile(r"application/([\w.-]+\+)?json")
_CHARSET = re.compile(r"charset=\"?utf-?8\"?", re.IGNORECASE)
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_LEVELS = bytes.maketrans(b'"[]{}', np.array([0, 1, -1, 1, -1], dtype=np.int8).tobytes())

_PATH = r"(?: - at `\$(?P<path>[^`]*)`)?"
_UNKNOWN = re.compile(rf"Object contains unknown field `(?P<name>.*?)`{_PATH}", re.DOTALL)
_MISSING = re.compile(rf"Object missing required field `(?P<name>.*?)`{_PATH}", re.DOTALL)
_WRONG = re.compile(rf"(?P<what>.*?){_PATH}", re.DOTALL)
_NO_MEMBER = re.compile("invalid (enum )?value ")
_TYPE_LIST = re.compile(r"`([^`]*)`")
_JSON_WORDS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_WORD = re.compile(r"\b(?:" + "|".join(_JSON_WORDS) + r")\b")

T = TypeVar("T")


async def read_json(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Read the whole body of a request: UTF-8, of bounded size and depth, ready for `decode`.

    Raises a `Problem` (400, 408, 413, 415), and starlette's ClientDisconnect where the client has gone. Reading stops
    at the first byte over the limit; the connection is closed after a body that was not read to its end.
    """
    headers = Headers(scope=scope)
    _check_headers(headers, limits)
    try:
        async with asyncio.timeout(limits.body_seconds):
            raw = await _read_bytes(receive, limits.body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_seconds:g} s; send it faster"
        raise Problem(408, message, code="body_timeout", headers=_CLOSE) from None
    if not raw.strip():
        raise Problem(400, "the body is empty; send a JSON object", code="invalid_json")
    check_utf8(raw)
    check_structure(raw, limits.body_depth, limits.body_containers)
    return raw


def _check_headers(headers: Headers, limits: Limits) -> None:
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limits.body_bytes:
        raise _too_large(limits.body_bytes)
    content_type = headers.get("content-type", "")
    kind, *parameters = (part.strip() for part in content_type.split(";"))
    is_json = _JSON_TYPE.fullmatch(kind.lower()) is not None
    if not is_json or not all(_CHARSET.fullmatch(part) for part in parameters if part.lower().startswith("charset")):
        what = f"the content type is '{shorten(content_type)}'" if content_type else "there is no content type"
        message = f"{what}; send JSON in UTF-8 and say so, with curl: -H 'Content-Type: application/json'"
        raise Problem(415, message, code="unsupported_content_type", headers=_CLOSE)
    encoding = headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"the content encoding is '{shorten(encoding)}'; send the body uncompressed"
        raise Problem(415, message, code="unsupported_content_encoding", headers=_CLOSE)


async def _read_bytes(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(limit: int) -> Problem:
    message = f"the body is larger than the {limit} bytes that are allowed; send less"
    return Problem(413, message, code="body_too_large", headers=_CLOSE)


def check_utf8(raw: bytes) -> None:
    """Refuse a body that is not UTF-8 throughout."""
    try:
        if not raw.isascii():
            raw.decode()
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is not UTF-8 at byte {error.start}", code="invalid_json") from None


def check_structure(raw: bytes, max_depth: int, max_containers: int) -> None:
    """Refuse JSON that nests too deep or has too many objects, lists or fields, in linear time and without decoding it.

    Brackets inside strings do not count. Of invalid JSON, the check is right up to the first error, which is as far as
    a decoder reads.
    """
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = raw.translate(None, _NOT_STRUCTURE)
    is_quote = np.frombuffer(marks, dtype=np.uint8) == ord('"')
    is_inside = np.logical_xor.accumulate(is_quote)
    is_opened = is_quote & is_inside
    levels = np.frombuffer(marks.translate(_LEVELS), dtype=np.int8) * ~is_inside
    depths = np.cumsum(levels, dtype=np.int32)
    if depths.max(initial=0) > max_depth:
        raise Problem(400, f"the body nests deeper than the {max_depth} levels that are allowed", code="limit_exceeded")
    if np.count_nonzero(levels == 1) > max_containers:
        message = f"the body has more than the {max_containers} objects and lists that are allowed"
        raise Problem(400, message, code="limit_exceeded")
    if np.count_nonzero(is_opened & (depths == 1)) > MAX_OUTER_STRINGS:
        message = f"the body has more than the {MAX_OUTER_STRINGS} names and strings that its outermost object may have"
        raise Problem(400, message, code="limit_exceeded")


def decode(raw: bytes, kind: type[T]) -> T:
    """Decode a body into its type. A `Problem` names the field at fault in `param` and in its text.

    Proxies and generated clients send null for all that they leave out, so a field that is null is not there.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        given = _without_nulls(raw)
        if given is not None:
            return decode(given, kind)
        raise _problem_of(str(error), kind) from None
    except UnicodeDecodeError:
        raise Problem(400, "the body is not UTF-8", code="invalid_json") from None
    except (msgspec.DecodeError, RecursionError) as error:
        detail = str(error) if isinstance(error, msgspec.DecodeError) else "it nests too deep"
        raise Problem(400, f"the body is not valid JSON: {detail}", code="invalid_json") from None


def _without_nulls(raw: bytes) -> bytes | None:
    """The body without the fields that are null; None where it has none."""
    if b"null" not in raw:
        return None
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    given = {name: value for name, value in fields.items() if bytes(value) != b"null"}
    return msgspec.json.encode(given) if len(given) < len(fields) else None


def shorten(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """The client's text as an error may show it: printable and short."""
    shown = text if len(text) <= max_chars else f"{text[:max_chars]} (cut)"
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)


def _problem_of(text: str, kind: type) -> Problem:
    """The problem of an error of msgspec. Of a long text the middle, which is the client's, is dropped."""
    if len(text) > MAX_ERROR_CHARS:
        text = text[: MAX_ERROR_CHARS // 2] + text[-MAX_ERROR_CHARS // 2 :]
    if match := _UNKNOWN.fullmatch(text):
        field = _join(match["path"], match["name"])
        message = f"the field '{field}' is not supported; remove it"
        return Problem(400, message, code="unknown_field", param=field)
    if match := _MISSING.fullmatch(text):
        field = _join(match["path"], match["name"])
        return Problem(400, f"the field '{field}' is missing; add it", code="missing_field", param=field)
    match = _WRONG.fullmatch(text)
    what, path = (match["what"], match["path"]) if match else (text, None)
    what = shorten(_TYPE_LIST.sub(_name_types, what), 2 * MAX_SHOWN_CHARS)
    what = what[:1].lower() + what[1:]
    if path is None:
        return Problem(400, f"the body is wrong: {what}", code="invalid_value")
    field = _join(path, "")
    allowed = allowed_values(kind, path) if _NO_MEMBER.match(what) else ""
    way_out = f"; use one of {allowed}" if "," in allowed else f"; use {allowed}" if allowed else ""
    return Problem(400, f"the field '{field}' is wrong: {what}{way_out}", code="invalid_value", param=field)


def _name_types(types: re.Match[str]) -> str:
    return _WORD.sub(lambda word: _JSON_WORDS[word[0]], types[1])


def _join(path: str | None, name: str) -> str:
    path = re.sub(r"\[\.{3}\]", "[*]", (path or "").removeprefix("."))
    return shorten(f"{path}.{name}".strip("."))
