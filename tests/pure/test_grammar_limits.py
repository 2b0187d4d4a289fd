"""Constraints that are malformed, too large or made to cost time end in a refusal that names the cause, and soon."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from glint.errors import TextError
from glint.text.grammar import Choice, Constraint, GrammarCompiler, GrammarLimits, JsonSchema, Regex, ToolCalls
from glint.text.tokenizer import Tokenizer
from glint.text.tools import Tool
from tests.pure.grammar_walk import allowed, build_compiler, build_tokenizer, push_text, steps

HANG_SECONDS = 60.0
INTERNALS = ("at 1(", "at 2(", ".rs", "<state>", "RegexAst", "(And", "Some(", "panick", "llguidance", "\n")


def nested(depth: int, wrap: str = "items") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", wrap: schema} if wrap == "items" else {wrap: [schema, {"type": "null"}]}
    return schema


def chained(count: int, **beside: Any) -> dict[str, Any]:
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} | beside for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{count}": {"type": "string"}}}


def doubled(count: int, keyword: str) -> dict[str, Any]:
    links = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * 2, "type": ["integer", "null"]} for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{count}": {"type": "integer"}}}


def many_properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {} for i in range(count)}}


REFUSED: dict[str, tuple[Constraint, str]] = {
    "nested groups": (Regex(60_000 * "(" + "a" + 60_000 * ")"), "120001 characters"),
    "open groups": (Regex(2_000 * "("), "regex"),
    "closed groups": (Regex(2_000 * "(" + "a" + 2_000 * ")"), "regex"),
    "long pattern": (Regex(3_000 * "a?"), "6000 characters"),
    "look-ahead": (Regex("(?=a)b"), "look-around"),
    "back-reference": (Regex(r"(a)\1"), "backreferences"),
    "inner anchor": (Regex("a^b"), "anchor only its ends"),
    "surrogate": (Regex("\ud800"), "lone surrogate"),
    "no pattern": (Regex(5), "int"),
    "no token": (Choice(("\x00\ud801",)), "lone surrogate"),
    "no choice": (Choice(()), "at least one"),
    "empty choice": (Choice(("a", "")), "not empty"),
    "many choices": (Choice(tuple(str(i) for i in range(5_000))), "5000 choices"),
    "large choices": (Choice(tuple(f"{i}{9_999 * 'x'}" for i in range(20))), "bytes together"),
    "deep schema": (JsonSchema(nested(5_000)), "deeper than 32"),
    "deep unions": (JsonSchema(nested(2_000, "anyOf")), "deeper than 32"),
    "large schema": (JsonSchema({"description": 70_000 * "x"}), "65536"),
    "large enum": (JsonSchema({"enum": list(range(3_000))}), "3000 values in enum"),
    "many properties": (JsonSchema(many_properties(1_000)), "1000 entries"),
    "many required": (JsonSchema({"type": "object", "required": [f"p{i}" for i in range(999)]}), "999 entries"),
    "many name patterns": (JsonSchema({"patternProperties": {f"^k{i}_": {} for i in range(99)}}), "99 patternProp"),
    "joined patterns": (JsonSchema({"allOf": [{"pattern": f"a.*b{i}c"} for i in range(64)]}), "64 pattern"),
    "chained patterns": (JsonSchema(chained(60, pattern="a.*b")), "60 pattern"),
    "doubled unions": (JsonSchema(doubled(90, "anyOf")), "too complex"),
    "large multiple": (JsonSchema({"type": "integer", "multipleOf": 1_000_003}), "1000003"),
    "scaled multiple": (JsonSchema({"type": "integer", "multipleOf": 1e9}), "1000000000"),
    "joined multiples": (JsonSchema({"allOf": [{"multipleOf": 997}, {"multipleOf": 1_009}]}), "product"),
    "circle": (JsonSchema({"$ref": "#"}), "no text that fits"),
    "circle of one": (JsonSchema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no text that fits"),
    "circle beside": (
        JsonSchema({"$ref": "#/$defs/a", "$defs": {"a": {"pattern": "a", "$ref": "#/$defs/a"}}}),
        "itself",
    ),
    "outer reference": (JsonSchema({"$ref": "http://a.b/c"}), "http://a.b/c"),
    "file reference": (JsonSchema({"items": {"$ref": "file:///etc/passwd"}}), "inside the schema"),
    "missing reference": (JsonSchema({"$ref": "#/$defs/none"}), "#/$defs/none"),
    "keywords": (JsonSchema({"type": "array", "uniqueItems": True, "if": {}}), '"uniqueItems"'),
    "options": (JsonSchema({"x-guidance": {"whitespace_flexible": True}}), "x-guidance"),
    "format": (JsonSchema({"type": "string", "format": "int32"}), "int32"),
    "oneOf": (JsonSchema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "use anyOf"),
    "type": (JsonSchema({"type": "strin"}), "strin"),
    "properties": (JsonSchema({"type": "object", "properties": [1]}), "properties must be"),
    "bad pattern": (JsonSchema({"type": "string", "pattern": "(a"}), "unclosed group"),
    "bounds": (JsonSchema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
    "range": (JsonSchema({"type": "number", "minimum": 1.2e-300, "maximum": 1e300}), "bounds"),
    "not a number": (JsonSchema({"minimum": float("nan")}), "not JSON"),
    "not JSON": (JsonSchema({"const": object()}), "not JSON"),
    "key": (JsonSchema({"properties": {5: {}}}), "not a string"),
    "list": (JsonSchema([]), "list"),
    "false": (JsonSchema(False), "false"),
    "tool": (ToolCalls((Tool("f", None, nested(50)),), True, True), "deeper than 32"),
    "tool list": (ToolCalls((Tool("f", None, []),), True, True), "list"),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return build_compiler(tokenizer)


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_come_soon_and_name_the_cause(compiler: GrammarCompiler, name: str) -> None:
    constraint, problem = REFUSED[name]
    begin = time.monotonic()
    with pytest.raises(TextError) as caught:
        compiler.compile(constraint)
    assert time.monotonic() - begin < HANG_SECONDS
    assert problem in str(caught.value)
    assert not [text for text in INTERNALS if text in str(caught.value)]
    assert len(str(caught.value)) < 400


COSTLY: dict[str, Constraint] = {
    "nested counts": Regex("((a{1,1000}){1,1000}){1,1000}"),
    "many states": Regex(".*a.{40}b"),
    "many counts": Regex("(.{0,5000}x){0,5000}"),
    "long chain": JsonSchema(chained(1_200)),
    "doubled allOf": JsonSchema(doubled(90, "allOf")),
    "large lengths": JsonSchema({"type": "string", "minLength": 10**6, "maxLength": 10**7}),
    "large arrays": JsonSchema({"type": "array", "items": {"type": "integer"}, "minItems": 10**18}),
    "most properties": JsonSchema(many_properties(400)),
    "most values": JsonSchema({"enum": [f"value {i}" for i in range(2_000)]}),
    "objects as values": JsonSchema({"enum": [{"a": i} for i in range(2_000)]}),
    "most multiples": JsonSchema({"type": "integer", "multipleOf": 9_973}),
    "most choices": Choice(tuple(f"choice {i}" for i in range(2_000))),
}


@pytest.mark.parametrize("name", COSTLY)
def test_costly_grammars_work_or_fail_soon(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    begin = time.monotonic()
    try:
        grammar = compiler.compile(COSTLY[name])
        for _, (token_id, _) in zip(range(60), steps(grammar, tokenizer, 3), strict=False):
            assert token_id < tokenizer.vocab_size
    except TextError as error:
        assert "too complex" in str(error)
    assert time.monotonic() - begin < HANG_SECONDS


def test_fuel_ends_a_running_grammar(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glint.text.grammar.TRIAL_TEXTS", 0)
    grammar = build_compiler(tokenizer).compile(Regex("((a{1,1000}){1,1000}){1,1000}"))
    with pytest.raises(TextError, match="limit of work for one token"):
        for length in range(1, 200):
            matcher = grammar.start()
            push_text(matcher, tokenizer, length * "a")
            allowed(matcher)


def test_a_panic_of_the_library_is_a_refusal(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def fail(*arguments: object, **options: object) -> None:
        raise panic("at some place in lib.rs")

    monkeypatch.setattr("llguidance.LLMatcher", fail)
    with pytest.raises(TextError, match="make it simpler") as caught:
        compiler.compile(Choice(("never asked for before",)))
    assert not [text for text in INTERNALS if text in str(caught.value)]


def test_tools_together_have_a_time_limit(tokenizer: Tokenizer) -> None:
    compiler = build_compiler(tokenizer, GrammarLimits(max_seconds=0.0))
    with pytest.raises(TextError, match="too complex by tool 'f'"):
        compiler.compile(ToolCalls((Tool("f"), Tool("g")), True, True))


def test_names_of_properties_are_no_keywords(compiler: GrammarCompiler) -> None:
    names = ("pattern", "enum", "multipleOf", "$ref", "allOf", "default", "properties", "required", "format")
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": list(names)}
    assert compiler.compile(JsonSchema(schema)).start().mask() is not None


def test_data_inside_a_schema_is_no_schema(compiler: GrammarCompiler) -> None:
    schema = {"const": {"$ref": "http://a.b/c", "multipleOf": 10**9}, "default": {"$ref": "x"}}
    assert compiler.compile(JsonSchema(schema)).start().mask() is not None


def random_schema(chance: random.Random, depth: int) -> Any:
    leaves: list[Any] = [
        None,
        True,
        False,
        -1,
        1.5,
        10**30,
        "",
        "a",
        "#/$defs/a",
        "(",
        "string",
        "object",
        [],
        {},
        "date",
    ]
    keywords = (
        "type",
        "properties",
        "items",
        "$ref",
        "anyOf",
        "allOf",
        "enum",
        "const",
        "pattern",
        "required",
        "format",
    )
    keywords += ("minLength", "maximum", "multipleOf", "prefixItems", "$defs", "patternProperties", "minItems", "oneOf")
    if depth == 0 or chance.random() < 0.3:
        return chance.choice(leaves)
    if chance.random() < 0.3:
        return [random_schema(chance, depth - 1) for _ in range(chance.randint(1, 3))]
    return {chance.choice(keywords): random_schema(chance, depth - 1) for _ in range(chance.randint(1, 4))}


def test_random_schemas_are_compiled_or_refused(compiler: GrammarCompiler) -> None:
    chance = random.Random(11)
    num_compiled = 0
    for _ in range(300):
        schema = random_schema(chance, 4)
        constraint: Constraint = JsonSchema(schema)
        if chance.random() < 0.3:
            constraint = ToolCalls(
                (Tool("f", None, {"type": "object", "properties": {"a": schema}}, True),), True, False
            )
        try:
            compiler.compile(constraint).start().mask()
            num_compiled += 1
        except TextError as error:
            assert not [text for text in INTERNALS if text in str(error)], str(error)
    assert num_compiled > 5


def test_random_patterns_are_compiled_or_refused(compiler: GrammarCompiler) -> None:
    chance = random.Random(12)
    pieces = (
        "a",
        "b",
        "(",
        ")",
        "[",
        "]",
        "{2,}",
        "{9}",
        "*",
        "+",
        "?",
        "|",
        "^",
        "$",
        ".",
        "\\",
        "\\d",
        "/",
        "\n",
        "é",
        "(?i)",
    )
    num_compiled = 0
    for _ in range(300):
        pattern = "".join(chance.choice(pieces) for _ in range(chance.randint(1, 12)))
        try:
            compiler.compile(Regex(pattern)).start().mask()
            num_compiled += 1
        except TextError as error:
            assert not [text for text in INTERNALS if text in str(error)], str(error)
    assert num_compiled > 5
