"""Checks of JSON schemas and patterns before any work is done on them."""

import json
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from glint.errors import TextError
from glint.text.constraint import GrammarLimits

ANNOTATIONS: Final = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
    + ("$comment", "$schema", "$id", "$anchor", "$defs", "definitions")
)
OPTIONS_KEYWORD: Final = "x-guidance"
_SCHEMA_MAPS: Final = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_DATA: Final = frozenset(("const", "enum", "default", "examples", "required"))
_JOINING: Final = frozenset(("$ref", "anyOf", "oneOf", "enum", "const"))


def to_json(value: object, what: str) -> str:
    """Writes a value as compact JSON, keys in their own order; raises TextError for what is not JSON."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise TextError(f"{what} is not JSON: {reason}; send plain JSON") from error


def check_pattern(pattern: object, what: str, limits: GrammarLimits) -> str:
    """Gives the pattern if it is a text of allowed length that a tokenizer can write."""
    if not isinstance(pattern, str):
        raise TextError(f"{what} is {type(pattern).__name__}; give a regular expression as a string")
    if len(pattern) > limits.max_pattern_length:
        raise TextError(f"{what} has {len(pattern)} characters, {limits.max_pattern_length} are the most")
    return check_text(pattern, what)


def check_text(text: str, what: str) -> str:
    """Gives the text if it is valid Unicode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(f"{what} holds a lone surrogate at {error.start}; give valid Unicode") from error
    return text


def check_options(options: Sequence[str], limits: GrammarLimits) -> Sequence[str]:
    """Gives the choices if they are texts that are not empty, of allowed number and size."""
    if not options or not all(isinstance(option, str) and option for option in options):
        raise TextError("choices must be a list of strings that are not empty, with at least one")
    if len(options) > limits.max_choices:
        raise TextError(f"there are {len(options)} choices, {limits.max_choices} are the most")
    size = sum(len(check_text(option, "a choice").encode("utf-8")) for option in options)
    if size > limits.max_choice_bytes:
        raise TextError(f"the choices have {size} bytes together, {limits.max_choice_bytes} are the most")
    return options


def check_schema(schema: object, what: str, limits: GrammarLimits) -> None:
    """Raises TextError for a schema that is too deep, too large, refers outside itself, or would be too much work.

    The work of the check itself grows with the size of the schema only.
    """
    if not isinstance(schema, Mapping | bool):
        raise TextError(f"{what} is {type(schema).__name__}; a JSON schema is an object or a boolean")
    if isinstance(schema, Mapping) and OPTIONS_KEYWORD in schema:
        raise TextError(f'{what} uses the keyword "{OPTIONS_KEYWORD}", which is not supported; remove it')
    _check_depth(schema, what, limits.max_schema_depth)
    size = len(to_json(schema, what))
    if size > limits.max_schema_bytes:
        raise TextError(f"{what} has {size} bytes as JSON, {limits.max_schema_bytes} are the most")
    work = _Work(what, limits)
    pending: list[tuple[object, bool]] = [(schema, False)]
    while pending:
        node, is_map = pending.pop()
        if isinstance(node, Mapping):
            if not is_map:
                work.add(node)
            pending += [
                (child, not is_map and name in _SCHEMA_MAPS)
                for name, child in node.items()
                if is_map or name not in _DATA
            ]
        elif isinstance(node, list | tuple):
            pending += [(child, False) for child in node]
    work.check()


def _check_depth(schema: object, what: str, max_depth: int) -> None:
    level: list[object] = [schema]
    for _ in range(max_depth + 1):
        children: list[object] = []
        for node in level:
            if isinstance(node, Mapping):
                if not all(isinstance(name, str) for name in node):
                    raise TextError(f"{what} has a key that is not a string; send plain JSON")
                children += node.values()
            elif isinstance(node, list | tuple):
                children += node
        if not children:
            return
        level = children
    raise TextError(f"{what} is nested deeper than {max_depth} levels; use $ref or a flatter schema")


class _Work:
    """Counts what makes a schema expensive."""

    def __init__(self, what: str, limits: GrammarLimits) -> None:
        self._what = what
        self._limits = limits
        self._num_patterns = 0
        self._num_pattern_properties = 0
        self._num_enum_values = 0
        self._multiples: list[Decimal] = []
        self._is_joined = False

    def add(self, schema: Mapping[str, Any]) -> None:
        """Counts the keywords of one schema object."""
        constraining = [name for name in schema if name not in ANNOTATIONS]
        if "allOf" in schema or (len(constraining) > 1 and any(name in _JOINING for name in constraining)):
            self._is_joined = True
        reference = schema.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise TextError(
                f"{self._what} refers to {reference[:80]!r}; only references inside the schema are followed"
            )
        if isinstance(schema.get("pattern"), str):
            self._num_patterns += 1
            check_pattern(schema["pattern"], f"a pattern of {self._what}", self._limits)
        if isinstance(schema.get("format"), str):
            self._num_patterns += 1
        self._add_sizes(schema)
        multiple = schema.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool):
            self._multiples.append(Decimal(repr(multiple)))

    def check(self) -> None:
        """Raises TextError if all schema objects together are too much."""
        limits = self._limits
        counts = (
            ("values in enum", self._num_enum_values, limits.max_enum_values),
            ("patternProperties", self._num_pattern_properties, limits.max_pattern_properties),
            ("as the sum of multipleOf", sum(_scaled(m, _decimals(m)) for m in self._multiples), limits.max_multiple),
        )
        for name, count, most in counts:
            if count > most:
                raise TextError(f"{self._what} has {count} {name}, {most} are the most")
        if self._is_joined and self._num_patterns > limits.max_joined_patterns:
            raise TextError(
                f"{self._what} has {self._num_patterns} pattern and format keywords and joins schemas (allOf, or "
                f"keywords beside $ref, anyOf or enum), {limits.max_joined_patterns} are the most then"
            )
        num_decimals = max(map(_decimals, self._multiples), default=0)
        if self._is_joined and math.prod(_scaled(m, num_decimals) for m in self._multiples) > limits.max_multiple:
            raise TextError(f"{self._what} joins multipleOf keywords whose product is over {limits.max_multiple}")

    def _add_sizes(self, schema: Mapping[str, Any]) -> None:
        enum = schema.get("enum")
        if isinstance(enum, list | tuple):
            self._num_enum_values += len(enum)
        patterns = schema.get("patternProperties")
        if isinstance(patterns, Mapping):
            self._num_pattern_properties += len(patterns)
            for pattern in patterns:
                check_pattern(pattern, f"a patternProperties name of {self._what}", self._limits)
        for keyword in ("properties", "required"):
            names = schema.get(keyword)
            if isinstance(names, Mapping | list | tuple) and len(names) > self._limits.max_properties:
                most = self._limits.max_properties
                raise TextError(f"{self._what} has {len(names)} entries in one {keyword}, {most} are the most")


def _scaled(multiple: Decimal, num_decimals: int) -> int:
    return max(1, abs(int(multiple.scaleb(num_decimals))))


def _decimals(multiple: Decimal) -> int:
    exponent = multiple.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0
