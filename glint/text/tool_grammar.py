"""The grammar of tool calls in the form of GLM-4.7.

A call is `<tool_call>NAME` with `<arg_key>K</arg_key><arg_value>V</arg_value>` for each argument and `</tool_call>`.
Strings are bare text without what ends a value: `</arg_value>`, the tags between two calls, a key in its tags. All
other values are JSON. A tag that is one token of the tokenizer is written as that token, another one letter by
letter.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from glint.errors import TextError
from glint.text.constraint import GrammarLimits, ToolCalls
from glint.text.schema_check import ANNOTATIONS, check_schema, check_text, to_json
from glint.text.tags import CALL_TAGS, Tag
from glint.text.tool_values import FREE, Value, ValueReader, quote, resolve
from glint.text.tools import Tool

VALUE_BREAKS: Final = "|".join(
    (Tag.VALUE_END, rf"{Tag.CALL_END}\s*{Tag.CALL}", f"{Tag.KEY}[^<]*{Tag.KEY_END}"),
)
_OBJECT_KEYWORDS: Final = frozenset(("type", "properties", "required", "additionalProperties"))


def tag_token_ids(find_token: Callable[[str], int | None]) -> dict[Tag, int]:
    """The tags of tool calls that are single tokens, with their ids."""
    found = {tag: find_token(tag) for tag in sorted(CALL_TAGS)}
    return {tag: token_id for tag, token_id in found.items() if token_id is not None}


def without(pattern: str) -> str:
    """A Lark expression for any text in which the pattern is not found."""
    escaped = pattern.replace("/", "\\/")
    return f"(/(?s:.*)/ & ~/(?s:.*)({escaped})(?s:.*)/)"


class ToolGrammar:
    """Writes the Lark grammar of tool calls; `json_rule` gives the expression for a JSON value of a schema.

    `build` leaves the values of the tools named in `free_tools` free.
    """

    def __init__(
        self,
        constraint: ToolCalls,
        token_ids: Mapping[Tag, int],
        json_rule: Callable[[Mapping[str, Any]], str],
    ) -> None:
        self._constraint = constraint
        self._token_ids = token_ids
        self._json_rule = json_rule
        self._lines: list[str] = []

    def build(self, free_tools: frozenset[str]) -> str:
        """The grammar, whose first rule is `start`."""
        self._lines = []
        calls = " | ".join(self._add_call(index, tool, free_tools) for index, tool in enumerate(self._constraint.tools))
        begin = self._write(Tag.CALL)
        more = f" ({begin} call)*" if self._constraint.allows_several else ""
        if self._constraint.is_required:
            start = f"start: {begin} call{more}"
        elif self._constraint.answer is not None:
            start = f"start: {self._json_rule(self._constraint.answer.as_schema)} | {begin} call{more}"
        else:
            text = self._add_terminal("TEXT", without(Tag.CALL))
            start = f"start: {text} | {self._ended('HEAD', without(Tag.CALL), Tag.CALL)} call{more}"
        return "\n".join([start, f"call: {calls}", *self._lines])

    def _add_call(self, index: int, tool: Tool, free_tools: frozenset[str]) -> str:
        parts = [quote(tool.name)]
        for position, (name, value, is_needed) in enumerate(read_arguments(tool, tool.name in free_tools)):
            written = self._write_argument(f"{index}_{position}", name, value)
            parts.append(written if is_needed else f"({written})?")
        self._lines.append(f"call_{index}: {' '.join(parts)} {self._write(Tag.CALL_END)}")
        return f"call_{index}"

    def _write_argument(self, suffix: str, name: str, value: Value) -> str:
        key = f"{self._write(Tag.KEY)} {quote(name)} {self._write(Tag.KEY_END)} {self._write(Tag.VALUE)}"
        if value.schema is not None:
            return f"{key} {self._json_rule(value.schema)} {self._write(Tag.VALUE_END)}"
        allowed = without(VALUE_BREAKS)
        if value.texts is not FREE.texts:
            self._add_terminal(f"TEXTS_{suffix}", " | ".join(value.texts))
            allowed = f"(TEXTS_{suffix} & {allowed})"
        return f"{key} {self._ended(f'VALUE_{suffix}', allowed, Tag.VALUE_END)}"

    def _write(self, tag: Tag) -> str:
        token_id = self._token_ids.get(tag)
        return quote(tag) if token_id is None else f"<[{token_id}]>"

    def _ended(self, name: str, expression: str, tag: Tag) -> str:
        if tag in self._token_ids:
            return f"{self._add_terminal(name, expression)} {self._write(tag)}"
        return self._add_terminal(name, f"{expression} {quote(tag)}")

    def _add_terminal(self, name: str, expression: str) -> str:
        self._lines.append(f"{name}: {expression}")
        return name


def read_arguments(tool: Tool, is_free: bool) -> list[tuple[str, Value, bool]]:
    """The arguments of a tool in the order of its schema: name, what it may be, whether it must be there."""
    what = f"tool {tool.name!r}"
    schema = resolve(tool.parameters, tool.parameters, what) if not is_free else dict(tool.parameters)
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        if is_free:
            return []
        raise TextError(f"{what} has properties or required of a wrong type; properties is an object, required a list")
    if not is_free:
        _check_object(schema, what)
    needed = [name for name in required if isinstance(name, str)]
    names = [*properties, *(name for name in needed if name not in properties)]
    for name in names:
        _check_name(name, f"an argument of {what}")
    if is_free:
        return [(name, FREE, name in needed) for name in names]
    read = ValueReader(tool.parameters, what).read
    return [
        (name, read(properties.get(name, True), name), name in needed) for name in _possible(names, properties, needed)
    ]


def _possible(names: Sequence[str], properties: Mapping[str, Any], needed: Sequence[str]) -> list[str]:
    return [name for name in names if name in needed or properties.get(name) is not False]


def _check_object(schema: Mapping[str, Any], what: str) -> None:
    others = [name for name in schema if name not in ANNOTATIONS and name not in _OBJECT_KEYWORDS]
    if others:
        raise TextError(
            f'{what} uses "{others[0]}" beside its properties, which strict calls do not support; remove it'
        )
    if schema.get("type", "object") != "object":
        raise TextError(f"{what} has parameters of type {schema['type']!r}; the type must be 'object'")


def check_tools(tools: Sequence[Tool], limits: GrammarLimits) -> None:
    """Raises TextError for tools without usable names, or with schemas that are too large or too much work."""
    if not tools:
        raise TextError("there is no tool to call; give at least one")
    if len(tools) > limits.max_tools:
        raise TextError(f"there are {len(tools)} tools, {limits.max_tools} are the most")
    names = [tool.name for tool in tools]
    size = 0
    for tool in tools:
        what = f"tool {tool.name!r}"
        _check_name(tool.name, "the name of a tool")
        if names.count(tool.name) > 1:
            raise TextError(f"{what} is given twice; names must differ")
        if not isinstance(tool.parameters, Mapping):
            raise TextError(f"the schema of {what} is {type(tool.parameters).__name__}; give an object")
        check_schema(tool.parameters, f"the schema of {what}", limits)
        size += len(to_json(tool.parameters, f"the schema of {what}"))
    if size > limits.max_tools_bytes:
        raise TextError(f"the schemas of the tools have {size} bytes together, {limits.max_tools_bytes} are the most")


def _check_name(name: object, what: str) -> None:
    if not isinstance(name, str) or not name or name != name.strip() or any(tag in name for tag in Tag):
        raise TextError(f"{what} is {name!r}; give a name without tags and without space at its ends")
    check_text(name, what)
