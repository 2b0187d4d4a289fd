"""Constraints on generated text, and the sizes up to which they are compiled."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glint.text.tools import Tool


@dataclass(frozen=True)
class JsonObject:
    """The text is one JSON object."""

    @property
    def as_schema(self) -> Mapping[str, Any]:
        """The schema of every object."""
        return {"type": "object"}


@dataclass(frozen=True)
class JsonSchema:
    """The text is a JSON value that fits `schema`; properties come in the schema's order."""

    schema: Mapping[str, Any] | bool

    @property
    def as_schema(self) -> Mapping[str, Any]:
        """The schema as an object."""
        return {} if isinstance(self.schema, bool) else self.schema


@dataclass(frozen=True)
class Regex:
    r"""The whole text matches `pattern`, in the syntax of Rust's regex crate.

    There is no look-around and no back-reference, ^ and $ may stand at the ends only, and \d is 0 to 9.
    """

    pattern: str


@dataclass(frozen=True)
class Choice:
    """The text is exactly one of `options`."""

    options: tuple[str, ...]


@dataclass(frozen=True)
class WrittenGrammar:
    """The text fits a grammar that the client wrote, in Lark or in GBNF.

    Of Lark there are rules, terminals, %ignore and %import. Control tokens are never part of the text.
    """

    source: str


@dataclass(frozen=True)
class ToolCalls:
    """The text holds calls of `tools` in the form of GLM-4.7, whose arguments fit the tools' schemas.

    With `is_required` there is nothing but calls, at least one; without it free text comes first and calls may follow.
    Where an `answer` is given, the text is either that JSON or calls. Unless `allows_several`, one call is the most. A
    strict tool whose schema cannot be held is refused; for another one the names of its arguments are held and their
    values are free.
    """

    tools: tuple[Tool, ...]
    is_required: bool
    allows_several: bool
    answer: JsonObject | JsonSchema | None = None


Constraint = JsonObject | JsonSchema | Regex | Choice | WrittenGrammar | ToolCalls


@dataclass(frozen=True)
class GrammarLimits:
    """The largest size of a constraint, and the most work of a grammar while it runs.

    `max_joined_patterns` and `max_multiple` bound what grows exponentially where schemas are combined: the patterns of
    a schema with allOf or keywords beside a $ref, and the numbers of multipleOf. `max_properties` is for one object,
    `max_enum_values` and `max_pattern_properties` for the whole schema. After `max_seconds` no further tool is looked
    at. The last five are the library's own limits.
    """

    max_schema_bytes: int = 65_536
    max_schema_depth: int = 32
    max_properties: int = 400
    max_enum_values: int = 2_048
    max_pattern_properties: int = 32
    max_joined_patterns: int = 8
    max_multiple: int = 10_000
    max_pattern_length: int = 4_096
    max_written_bytes: int = 16_384
    max_written_rules: int = 256
    max_choices: int = 2_048
    max_choice_bytes: int = 65_536
    max_tools: int = 256
    max_tools_bytes: int = 262_144
    max_seconds: float = 5.0
    max_cached_grammars: int = 16
    initial_fuel: int = 1_000_000
    step_fuel: int = 200_000
    max_step_items: int = 50_000
    max_lexer_states: int = 30_000
    max_grammar_size: int = 100_000
