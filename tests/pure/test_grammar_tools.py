"""Grammars of tool calls: random calls are read back by the output parser and fit the schemas of their tools."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import jsonschema
import pytest
import regex

from glint.errors import TextError
from glint.text.grammar import GrammarCompiler, JsonObject, JsonSchema, Matcher, ToolCalls
from glint.text.output import OutputStart, ParsedOutput, parse_output
from glint.text.tokenizer import Tokenizer
from glint.text.tools import Tool
from tests.pure.grammar_walk import TAGS, allowed, build_compiler, build_tokenizer, end_ids, push_text, steps, walk

NUM_WALKS = 4
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}
PROPERTIES: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "short": {"type": "string", "minLength": 2, "maxLength": 4},
    "exact": {"type": "string", "minLength": 3, "maxLength": 3},
    "code": {"type": "string", "pattern": "^[a-c]{2}\\d$"},
    "found": {"type": "string", "pattern": "a|b/c", "maxLength": 9},
    "unit": {"enum": ["metric", "met", 'a"b\n', "ü"]},
    "number": {"type": "integer", "minimum": 3, "maximum": 120},
    "flag": {"type": "boolean", "description": "a flag"},
    "list": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    "point": {"$ref": "#/$defs/point"},
    "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
    "maybe": {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"type": "null"}]},
    "mixed": {"type": ["string", "integer"], "maxLength": 3},
    "choice": {"enum": ["a", 5, None]},
    "numbers": {"enum": [5, 7.5, 70]},
    "oneof": {"oneOf": [{"const": "up"}, {"const": "down"}, {"type": "boolean"}]},
    "other": {"allOf": [{"$ref": "#/$defs/point"}]},
    "tree": {"$ref": "#/$defs/tree"},
    "shape": {"properties": {"y": {"type": "integer"}}, "required": ["y"], "additionalProperties": False},
    "anything": {},
}
TREE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}}}
DEFINITIONS = {"point": POINT, "tree": TREE | {"additionalProperties": False, "required": ["next"]}}
KINDS = {"spelled": (), "tokens": TAGS, "mixed": TAGS[:1] + TAGS[-1:]}


def make_tool(name: str, properties: dict[str, Any], required: list[str], is_strict: bool = True) -> Tool:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(name, None, schema | {"$defs": DEFINITIONS}, is_strict)


TOOLS = (
    Tool("now"),
    make_tool("look", {"city": {"type": "string"}, "unit": PROPERTIES["unit"]}, ["city"]),
    make_tool("look_up", {"a": PROPERTIES["number"], "b": PROPERTIES["point"], "c": {"const": "x"}}, ["b"]),
)


@pytest.fixture(scope="module", params=["spelled", "tokens", pytest.param("mixed", marks=pytest.mark.slow)])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"), KINDS[request.param])


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return build_compiler(tokenizer)


def read(text: bytes, tools: tuple[Tool, ...]) -> ParsedOutput:
    return parse_output(text.decode(), OutputStart.CONTENT, tools)


def check_calls(output: ParsedOutput, tools: tuple[Tool, ...]) -> None:
    schemas = {tool.name: tool.parameters for tool in tools}
    for call in output.calls:
        jsonschema.Draft202012Validator(schemas[call.name]).validate(json.loads(call.arguments))


@pytest.mark.parametrize("name", PROPERTIES)
def test_values_fit_their_schema(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    tools = (make_tool("f", {name: PROPERTIES[name]}, [name]),)
    grammar = compiler.compile(ToolCalls(tools, True, False))
    for seed in range(NUM_WALKS):
        text = walk(grammar, tokenizer, seed)
        output = read(text, tools)
        assert (len(output.calls), output.content, output.reasoning) == (1, "", "")
        check_calls(output, tools)
        written = json.loads(output.calls[0].arguments)[name]
        if isinstance(written, str):
            begin, end = f"<tool_call>f<arg_key>{name}</arg_key><arg_value>", "</arg_value></tool_call>"
            assert text.decode() == begin + written + end


def test_required_calls_are_all_there_is(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(ToolCalls(TOOLS, True, True))
    counts, names, lengths = set(), set(), set()
    for seed in range(24):
        output = read(walk(grammar, tokenizer, seed), TOOLS)
        assert (output.content, output.reasoning) == ("", "")
        check_calls(output, TOOLS)
        counts.add(len(output.calls))
        names |= {call.name for call in output.calls}
        lengths |= {len(json.loads(call.arguments)) for call in output.calls}
    assert min(counts) == 1 and max(counts) > 1
    assert names >= {"now", "look"}
    assert lengths >= {0, 1, 2}


def test_one_call_is_the_most_unless_several_are_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(ToolCalls(TOOLS, True, False)).start()
    for tag_or_text in ("<tool_call>", "now", "</tool_call>"):
        push(matcher, tokenizer, tag_or_text)
    assert matcher.is_finished


def push(matcher: Matcher, tokenizer: Tokenizer, text: str) -> None:
    token_id = tokenizer.token_to_id(text) if text in TAGS else None
    if token_id is None:
        push_text(matcher, tokenizer, text)
    else:
        matcher.accept(token_id)


@pytest.mark.parametrize("allows_several", [False, True])
def test_free_text_may_end_in_calls(compiler: GrammarCompiler, tokenizer: Tokenizer, allows_several: bool) -> None:
    grammar = compiler.compile(ToolCalls(TOOLS, False, allows_several))
    outputs = [read(walk(grammar, tokenizer, seed), TOOLS) for seed in range(24)]
    for output in outputs:
        check_calls(output, TOOLS)
    assert any(output.content and not output.calls for output in outputs)
    matcher = grammar.start()
    for part in ("I look: <tool", "<tool_call>", "now", "</tool_call>"):
        push(matcher, tokenizer, part)
    assert matcher.is_finished is not allows_several


def test_an_answer_is_either_its_json_or_calls(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(ToolCalls(TOOLS, False, True, JsonSchema(POINT)))
    outputs = [read(walk(grammar, tokenizer, seed), TOOLS) for seed in range(24)]
    for output in outputs:
        check_calls(output, TOOLS)
        assert bool(output.calls) is not bool(output.content)
        if output.content:
            jsonschema.validate(json.loads(output.content), POINT)
    assert 0 < sum(bool(output.calls) for output in outputs) < len(outputs)
    objects = compiler.compile(ToolCalls(TOOLS, False, True, JsonObject())).start()
    push_text(objects, tokenizer, '{"y"')
    with pytest.raises(TextError):
        push_text(grammar.start(), tokenizer, '{"y"')


def test_keys_come_in_order_and_needed_ones_cannot_be_left_out(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    parts = ["<tool_call>", "look_up", "<arg_key>", "b", "</arg_key>", "<arg_value>", '{"x": 1}', "</arg_value>"]
    grammar = compiler.compile(ToolCalls(TOOLS, True, False))
    for wrong_at, wrong in ((1, "lo_"), (2, "</tool_call>"), (3, "c"), (6, "x"), (6, '{"x":"')):
        matcher = grammar.start()
        for part in parts[:wrong_at]:
            push(matcher, tokenizer, part)
        with pytest.raises(TextError):
            push(matcher, tokenizer, wrong)
    matcher = grammar.start()
    for part in (*parts, "</tool_call>"):
        push(matcher, tokenizer, part)
    assert matcher.is_finished


def test_tags_are_tokens_where_there_are_such_tokens(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(ToolCalls(TOOLS, True, True))
    known = {tokenizer.token_to_id(tag): tag for tag in TAGS if tokenizer.token_to_id(tag) is not None}
    call, end, *argument = (f"({tag})" if tag in known.values() else "" for tag in TAGS)
    for seed in range(NUM_WALKS):
        tokens = [token_id for token_id, _ in steps(grammar, tokenizer, seed)]
        written = "".join(known.get(token_id, "") for token_id in tokens)
        assert regex.fullmatch(f"({call}({''.join(argument)})*{end})+", written)
    if known:
        assert [known.get(token_id) for token_id in allowed(grammar.start())] == ["<tool_call>"]


CALL = (
    r"<tool_call>(?:now|look<arg_key>city</arg_key><arg_value>[ab]+</arg_value>"
    r"(?:<arg_key>n</arg_key><arg_value>(?:0|[1-9])</arg_value>)?)</tool_call>"
)


def can_go_on(text: str, is_required: bool) -> bool:
    """Whether a text is the beginning of free text and calls."""
    begin = text.find("<tool_call>")
    if not is_required and begin < 0:
        return True
    return regex.fullmatch(f"({CALL})+", text[0 if is_required else begin :], partial=True) is not None


@pytest.mark.parametrize("is_required", [False, True])
def test_masks_of_spelled_calls_are_exact(tmp_path_factory: pytest.TempPathFactory, is_required: bool) -> None:
    tokenizer = build_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    city = {"type": "string", "pattern": "^[ab]+$"}
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    tools = (Tool("now"), make_tool("look", {"city": city, "n": digit}, ["city"]))
    grammar = build_compiler(tokenizer).compile(ToolCalls(tools, is_required, True))
    words = {index: tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size)}
    readable = {
        index: word.decode() for index, word in words.items() if word.isascii() and not tokenizer.is_special(index)
    }
    texts = ["", "<tool_call>now</tool_call><tool_", "<tool_call>look<arg_key>city</arg_key><arg_value>ab"]
    texts += ["<tool_call>look<arg_key>city</arg_key><arg_value>b</arg_value><arg_key>n</arg_key><arg_value>"]
    texts += [texts[-1] + "3", texts[-1] + "3</arg_value></tool_call>"]
    for whole in texts:
        for end in range(len(whole) + 1):
            matcher = grammar.start()
            push_text(matcher, tokenizer, whole[:end])
            expected = {index for index, word in readable.items() if can_go_on(whole[:end] + word, is_required)}
            found = {index for index in allowed(matcher) if index in readable}
            assert found == expected, f"after {whole[:end]!r}"


WORD_OR_INTEGER = {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"type": "integer"}]}
BARE_VALUES = [
    *((WORD_OR_INTEGER, text, True) for text in ("ab", "0", "-7", "10")),
    *((WORD_OR_INTEGER, text, False) for text in ("", "01", "-", "a1", "1a")),
    *(({"type": "string"}, text, True) for text in ("", "<arg_key>", "</arg_key><arg_key>", "<arg_key>a<b</arg_key>")),
    *(({"type": "string"}, text, False) for text in ("<arg_key></arg_key>", "x<arg_key>b</arg_key>y")),
]


@pytest.mark.parametrize(("schema", "text", "fits"), BARE_VALUES)
def test_bare_values_are_held_to_their_letters(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], text: str, fits: bool
) -> None:
    matcher = compiler.compile(ToolCalls((make_tool("f", {"a": schema}, ["a"]),), True, False)).start()
    for part in ("<tool_call>", "f", "<arg_key>", "a", "</arg_key>", "<arg_value>"):
        push(matcher, tokenizer, part)
    with nullcontext() if fits else pytest.raises(TextError, match="does not fit"):
        push_text(matcher, tokenizer, text)
        push(matcher, tokenizer, "</arg_value>")
    if fits:
        push(matcher, tokenizer, "</tool_call>")
        assert matcher.is_finished


def test_needed_names_without_a_schema_are_free(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    tools = (Tool("f", None, {"type": "object", "required": ["a"]}, True),)
    grammar = compiler.compile(ToolCalls(tools, True, False))
    for seed in range(5):
        assert list(json.loads(read(walk(grammar, tokenizer, seed), tools).calls[0].arguments)) == ["a"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "if": ({"properties": {"a": {"type": "object", "if": {}}}}, '"if"'),
    "not": ({"properties": {"a": {"type": "string", "not": {}}}}, '"not"'),
    "top": ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, '"anyOf"'),
    "type": ({"type": "array"}, "'array'"),
    "reference": ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "none"),
    "circle": ({"properties": {"a": {"$ref": "#/properties/a"}}}, "refers to itself"),
    "format": ({"properties": {"a": {"type": "array", "items": {"type": "string", "format": "int9"}}}}, "int9"),
    "anchor": ({"properties": {"a": {"type": "string", "pattern": "a^b"}}}, "its ends only"),
    "tag": ({"properties": {"a": {"enum": ["x</arg_value>"]}}}, "holds </arg_value>"),
    "mixture": ({"properties": {"a": {"anyOf": [{"enum": ["x"]}, POINT]}}}, "use one type"),
    "overlap": ({"properties": {"a": {"oneOf": [{"type": "string", "maxLength": 2}, {"const": "a"}]}}}, "use anyOf"),
    "twice": ({"properties": {"a": {"oneOf": [{"const": "a"}, {"enum": ["b", "a"]}]}}}, "use anyOf"),
    "lengths": ({"properties": {"a": {"type": "string", "minLength": 3, "maxLength": 2}}}, "minLength 3"),
    "false": ({"properties": {"a": False}, "required": ["a"]}, "false allows no value"),
    "enum": ({"properties": {"a": {"type": "integer", "enum": ["x"]}}}, "no value of its type"),
    "name": ({"properties": {" a": {}}}, "' a'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_strict_schemas_that_cannot_be_held_are_refused(compiler: GrammarCompiler, name: str) -> None:
    schema, problem = REFUSED[name]
    with pytest.raises(TextError) as caught:
        compiler.compile(ToolCalls((Tool("now"), Tool("f", None, schema, True)), True, True))
    assert problem in str(caught.value)
    assert "'f'" in str(caught.value)


def test_a_strict_tool_is_not_taken_for_the_same_one_that_is_not_strict(compiler: GrammarCompiler) -> None:
    schema, problem = REFUSED["not"]
    assert compiler.compile(ToolCalls((Tool("f", None, schema),), True, True)).start().mask()
    with pytest.raises(TextError, match=problem):
        compiler.compile(ToolCalls((Tool("f", None, schema, True),), True, True))


@pytest.mark.parametrize("name", sorted(set(REFUSED) - {"name"}))
def test_other_tools_keep_their_names_and_the_names_of_arguments(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    tools = (Tool("f", None, REFUSED[name][0]),)
    grammar = compiler.compile(ToolCalls(tools, True, False))
    for seed in range(2):
        (call,) = read(walk(grammar, tokenizer, seed), tools).calls
        assert call.name == "f"
        assert set(json.loads(call.arguments)) <= {"a"}


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ((), "at least one"),
        ((Tool("f"), Tool("f")), "twice"),
        ((Tool(""),), "''"),
        ((Tool("a<arg_key>"),), "without tags"),
        (tuple(Tool(f"f{index}") for index in range(300)), "300 tools"),
        (tuple(Tool(f"f{index}", None, {"title": 60_000 * "x"}) for index in range(5)), "together"),
    ],
)
def test_unusable_lists_of_tools_are_refused(compiler: GrammarCompiler, tools: tuple[Tool, ...], problem: str) -> None:
    with pytest.raises(TextError, match=problem):
        compiler.compile(ToolCalls(tools, True, True))


def test_ends_are_allowed_behind_free_text_only(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    ends = {index for index in end_ids(tokenizer) if index is not None}
    assert allowed(compiler.compile(ToolCalls(TOOLS, False, True)).start()) >= ends
    assert not allowed(compiler.compile(ToolCalls(TOOLS, True, True)).start()) & ends


def test_a_call_cannot_come_before_the_grammar_begins(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    (begin,) = tokenizer.encode("Q")
    matcher = compiler.compile(ToolCalls((Tool("now"),), is_required=True, allows_several=False)).start(begin)
    tags = {tokenizer.token_to_id(tag) for tag in TAGS} - {None}
    assert set(range(tokenizer.vocab_size)) - allowed(matcher) == end_ids(tokenizer) | tags
