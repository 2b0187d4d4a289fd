"""The values that one tool argument may have: bare text for strings, JSON for everything else."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from glint.errors import TextError
from glint.text.arguments import follow, kinds_of
from glint.text.schema_check import ANNOTATIONS
from glint.text.tags import Tag

MAX_REFERENCES: Final = 32
_STRING_KEYWORDS: Final = frozenset(("minLength", "maxLength", "pattern", "format"))
_ARRAY_KEYWORDS: Final = frozenset(("items", "prefixItems", "minItems", "maxItems", "additionalItems"))
_OBJECT_KEYWORDS: Final = frozenset(
    ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties")
)
_NUMBER_KEYWORDS: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_OTHER_KEYWORDS: Final = _ARRAY_KEYWORDS | _OBJECT_KEYWORDS | _NUMBER_KEYWORDS
_TYPES: Final = ("string", "null", "boolean", "integer", "number", "array", "object")
_SCALARS: Final = {
    "null": '"null"',
    "boolean": '"true" | "false"',
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
}
_ANY_TEXT: Final = "/(?s:.*)/"
_NEEDS_SYNTAX: Final = re.compile(r"\\.|\[\^?\]?|[\]()|^$]", re.DOTALL)


def quote(text: str) -> str:
    """The text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def to_lark(pattern: str, ascii_classes: str) -> str:
    """The pattern as it stands between slashes; of the classes d, w and s those named are of ASCII only."""
    from llguidance import regex_to_lark

    return str(regex_to_lark(pattern, ascii_classes))


@dataclass(frozen=True)
class Value:
    """Either bare texts, given as Lark expressions of which one holds, or JSON of a schema."""

    texts: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None


FREE: Final = Value(texts=(_ANY_TEXT,))


class ValueReader:
    """Reads the schemas of a tool's arguments; `what` names the tool in errors.

    A `format` beside a bare string says nothing, as JSON Schema has it. Where a free string may stand beside another
    type, text that reads as that type is taken for it without a check of its further keywords. Raises TextError for
    what cannot be held.
    """

    def __init__(self, root: Mapping[str, Any], what: str) -> None:
        self._root = root
        self._what = what

    def read(self, schema: object, name: str) -> Value:
        """The values that the argument `name` of this schema may have."""
        where = f"argument {name!r} of {self._what}"
        texts, schemas = self._split(schema, where, 0)
        if _ANY_TEXT in texts:
            return FREE
        if not schemas:
            return Value(texts=tuple(texts))
        if not texts:
            return Value(schema=self._with_definitions(schemas[0] if len(schemas) == 1 else {"anyOf": schemas}, where))
        return Value(texts=(*texts, *(_scalar_text(schema, where) for schema in schemas)))

    def _split(self, schema: object, where: str, depth: int) -> tuple[list[str], list[dict[str, Any]]]:
        """The bare texts and the JSON schemas of which the value fits one."""
        if depth > MAX_REFERENCES:
            raise TextError(f"{where} is nested too deep; use a flatter schema")
        if schema is True:
            return [_ANY_TEXT], []
        if not isinstance(schema, Mapping):
            raise TextError(f"{where} has no usable schema; a schema is an object, and false allows no value")
        found = resolve(schema, self._root, where)
        keywords = {name for name in found if name not in ANNOTATIONS}
        if keywords <= {"type", "enum", "const"} and keywords & {"enum", "const"}:
            return _split_constants(found, where)
        for union in ("anyOf", "oneOf"):
            if keywords == {union}:
                return self._split_union(found, union, where, depth)
        if "type" in keywords:
            return _split_types(found, keywords, where)
        return _split_untyped(found, keywords, where)

    def _split_union(
        self, schema: Mapping[str, Any], keyword: str, where: str, depth: int
    ) -> tuple[list[str], list[dict[str, Any]]]:
        options = schema[keyword]
        if not isinstance(options, list | tuple) or not options:
            raise TextError(f"{where} has {keyword} without a list of schemas")
        parts = [self._split(option, where, depth + 1) for option in options]
        texts = [text for found, _ in parts for text in found]
        schemas = [found for _, some in parts for found in some]
        if keyword == "oneOf":
            if len(set(texts)) < len(texts) or (len(texts) > 1 and not all(text.startswith('"') for text in texts)):
                raise TextError(f"{where} has oneOf with strings that more than one schema may allow; use anyOf")
            if len(schemas) > 1:
                schemas = [{"oneOf": schemas}]
        return texts, schemas

    def _with_definitions(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        """The schema with the definitions of the tool that it uses, also by way of others."""
        needed: dict[tuple[str, str], object] = {}
        pending: list[object] = [schema]
        while pending:
            for place, name in _references(pending.pop(), where):
                definitions = self._root.get(place)
                if not isinstance(definitions, Mapping) or name not in definitions:
                    raise TextError(f'{where} refers to "#/{place}/{name}", which is not there')
                if (place, name) not in needed:
                    needed[place, name] = definitions[name]
                    pending.append(definitions[name])
        result = {name: value for name, value in schema.items() if name not in ("$defs", "definitions")}
        for (place, name), definition in needed.items():
            result.setdefault(place, {})[name] = definition
        return result


def resolve(schema: Mapping[str, Any], root: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Follows a schema that is only a reference, or an allOf of one schema, to what it stands for."""
    for _ in range(MAX_REFERENCES):
        keywords = [name for name in schema if name not in ANNOTATIONS]
        found: object
        if keywords == ["$ref"]:
            found = follow(root, schema["$ref"])
            if not isinstance(found, Mapping):
                raise TextError(f"{where} refers to {str(schema['$ref'])[:80]!r}, which is not there")
        elif keywords == ["allOf"] and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
            found = schema["allOf"][0]
        else:
            return dict(schema)
        if not isinstance(found, Mapping):
            return {"allOf": [found]}
        schema = found
    raise TextError(f"{where} refers to itself; end the references in a schema")


def _split_constants(schema: Mapping[str, Any], where: str) -> tuple[list[str], list[dict[str, Any]]]:
    values = schema.get("enum", [schema.get("const")])
    if not isinstance(values, list | tuple) or not values:
        raise TextError(f"{where} has an enum without values")
    if "const" in schema and "enum" in schema:
        raise TextError(f"{where} has both enum and const; keep one of them")
    types = frozenset(_types_of(schema, where) if "type" in schema else _TYPES)
    fitting = [value for value in values if kinds_of(value) & types]
    if not fitting:
        raise TextError(f"{where} has no value of its type; correct enum or type")
    strings = [value for value in fitting if isinstance(value, str)]
    others = [value for value in fitting if not isinstance(value, str)]
    for text in strings:
        if Tag.VALUE_END in text:
            raise TextError(f"{where} has the value {text[:80]!r}, which holds {Tag.VALUE_END}; remove it")
    return [quote(text) for text in dict.fromkeys(strings)], [{"enum": others}] if others else []


def _types_of(schema: Mapping[str, Any], where: str) -> Sequence[str]:
    declared = schema["type"]
    types = declared if isinstance(declared, list | tuple) else [declared]
    if not types or not all(isinstance(name, str) and name in _TYPES for name in types):
        raise TextError(f"{where} has the type {declared!r}; types are {', '.join(_TYPES)}")
    return types


def _split_types(schema: Mapping[str, Any], keywords: set[str], where: str) -> tuple[list[str], list[dict[str, Any]]]:
    types = _types_of(schema, where)
    if "string" not in types:
        return [], [dict(schema)]
    others = [name for name in types if name != "string"]
    if not others:
        _refuse_others(keywords - _STRING_KEYWORDS - {"type"}, where)
        return [_string_text(schema, where)], []
    _refuse_others(keywords - _STRING_KEYWORDS - _OTHER_KEYWORDS - {"type"}, where)
    rest = {name: value for name, value in schema.items() if name not in _STRING_KEYWORDS}
    return [_string_text(schema, where)], [rest | {"type": others}]


def _split_untyped(schema: Mapping[str, Any], keywords: set[str], where: str) -> tuple[list[str], list[dict[str, Any]]]:
    _refuse_others(keywords - _STRING_KEYWORDS - _OTHER_KEYWORDS, where)
    if keywords & _OBJECT_KEYWORDS:
        return [], [dict(schema) | {"type": "object"}]
    if keywords & _ARRAY_KEYWORDS:
        return [], [dict(schema) | {"type": "array"}]
    return [_string_text(schema, where)], []


def _refuse_others(keywords: set[str], where: str) -> None:
    if keywords:
        raise TextError(f'{where} uses "{min(keywords)}" for a string, which strict calls do not support; remove it')


def _string_text(schema: Mapping[str, Any], where: str) -> str:
    """The Lark expression of a bare string: its length and its pattern, which may match anywhere inside."""
    parts = []
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    for length in (least, 0 if most is None else most):
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise TextError(f"{where} has the length {length!r}; lengths are whole numbers from 0 on")
    if least or most is not None:
        if most is not None and most < least:
            raise TextError(f"{where} has minLength {least} over maxLength {most}")
        parts.append(f"/(?s:.){{{least},{'' if most is None else most}}}/")
    if "pattern" in schema:
        parts.append(f"/{_searched(schema['pattern'], where)}/")
    return f"({' & '.join(parts)})" if parts else _ANY_TEXT


def _searched(pattern: object, where: str) -> str:
    """A pattern that matches whole texts in which `pattern` is found; anchors stand at its ends only."""
    if not isinstance(pattern, str):
        raise TextError(f"{where} has a pattern that is {type(pattern).__name__}; give a string")
    begin, end, core = "(?s:.*)", "(?s:.*)", pattern
    pieces = [(match[0], match.start()) for match in _NEEDS_SYNTAX.finditer(pattern)]
    depth, is_class, anchors, has_choice = 0, False, [], False
    for piece, place in pieces:
        if is_class:
            is_class = piece != "]"
        elif piece.startswith("["):
            is_class = True
        elif piece in "()":
            depth += 1 if piece == "(" else -1
        elif piece in "^$":
            anchors.append(place)
        elif piece == "|" and depth == 0:
            has_choice = True
    if has_choice and anchors:
        raise TextError(f"{where} has the pattern {pattern[:80]!r}; put ( ) around the choice between its anchors")
    if anchors and anchors[0] == 0 and core.startswith("^"):
        begin, core = "", core[1:]
        anchors = anchors[1:]
    if anchors and anchors[-1] == len(pattern) - 1:
        end, core = "", core[:-1]
        anchors = anchors[:-1]
    if anchors:
        raise TextError(f"{where} has the pattern {pattern[:80]!r}; ^ and $ may stand at its ends only")
    return f"{begin}(?:{to_lark(core, 'dw')}){end}"


def _scalar_text(schema: Mapping[str, Any], where: str) -> str:
    """The bare text of a JSON value that stands beside a string that is not free."""
    keywords = {name for name in schema if name not in ANNOTATIONS}
    if "enum" in keywords and all(isinstance(value, int | float | None) for value in schema["enum"]):
        return " | ".join(quote(json.dumps(value)) for value in schema["enum"])
    types = _types_of(schema, where) if keywords == {"type"} else ()
    if not types or not all(name in _SCALARS for name in types):
        raise TextError(f"{where} joins a string that is not free with other JSON; use one type, or a free string")
    return " | ".join(_SCALARS[name] for name in types)


def _references(schema: object, where: str) -> list[tuple[str, str]]:
    found = []
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            reference = node.get("$ref")
            if isinstance(reference, str):
                parts = reference.split("/")
                if len(parts) < 3 or parts[0] != "#" or parts[1] not in ("$defs", "definitions"):
                    raise TextError(f"{where} refers to {reference[:80]!r}; put it under $defs")
                found.append((parts[1], parts[2].replace("~1", "/").replace("~0", "~")))
            pending += node.values()
        elif isinstance(node, list | tuple):
            pending += node
    return found
