"""Grammars over tokens: what random walks through the masks write, and the masks against an independent matcher."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_uint32
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import regex

from glint.errors import TextError
from glint.text.grammar import Choice, Constraint, GrammarCompiler, GrammarLimits, JsonObject, JsonSchema, Regex
from glint.text.tokenizer import Tokenizer
from tests.pure.grammar_walk import (
    EXTRA_ROWS,
    allowed,
    build_compiler,
    build_tokenizer,
    end_ids,
    push_text,
    steps,
    walk,
)

NUM_WALKS = 15
SPACE = r"(?: |\n {0,24})?"
SCHEMAS: dict[str, Any] = {
    "flat": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 5}, "c": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}, "minItems": 1, "maxItems": 3},
            "kind": {"enum": ["x", 5, None, True]},
        },
        "required": ["kind", "rows"],
        "$defs": {"row": {"anyOf": [{"type": "number", "minimum": -2, "maximum": 70}, {"type": "null"}]}},
    },
    "recursive": {
        "type": "object",
        "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    },
    "pattern": {"type": "array", "items": {"type": "string", "pattern": "^[a-f]+-[0-9]{2}$"}, "maxItems": 2},
    "format": {"type": "array", "items": {"type": "string", "format": "ipv4"}, "minItems": 1, "maxItems": 3},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "tuple": {"type": "array", "prefixItems": [{"const": "p"}, {"type": "integer", "multipleOf": 7}], "items": False},
    "union": {"oneOf": [{"type": "integer", "exclusiveMinimum": 3, "maximum": 300}, {"type": "boolean"}]},
    "anything": True,
}
PATTERNS = (
    "[0-9]{3}-[a-f]+",
    "(red|green)(, (red|green)){0,3}",
    "^a[^b]?c$",
    r"x\d{1,3}/[\d\.]",
    "(?i)ab+",
    "ü{2,4}|é",
)
CHOICES = (("red", "green", "redder"), ("a", "ab", "abc"), ('q"\n', "\\d", "über 😀"), ("one",))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return build_tokenizer(tmp_path_factory.mktemp("tokenizer"), ("<think>", "</think>"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return build_compiler(tokenizer)


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_fits_its_schema(compiler: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    grammar = compiler.compile(JsonSchema(SCHEMAS[name]))
    checker = jsonschema.Draft202012Validator(
        SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for seed in range(NUM_WALKS):
        checker.validate(json.loads(walk(grammar, tokenizer, seed)))


def test_json_objects_are_objects(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(JsonObject())
    for seed in range(NUM_WALKS):
        assert isinstance(json.loads(walk(grammar, tokenizer, seed)), dict)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_text_matches_its_pattern(compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str) -> None:
    grammar = compiler.compile(Regex(pattern))
    for seed in range(NUM_WALKS):
        assert re.fullmatch(pattern, walk(grammar, tokenizer, seed).decode())


@pytest.mark.parametrize("options", CHOICES)
def test_every_choice_comes_and_nothing_else(
    compiler: GrammarCompiler, tokenizer: Tokenizer, options: tuple[str, ...]
) -> None:
    grammar = compiler.compile(Choice(options))
    assert {walk(grammar, tokenizer, seed).decode() for seed in range(200)} == set(options)


def test_space_cannot_run_away(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(JsonObject()).start()
    push_text(matcher, tokenizer, "{\n" + 24 * " ")
    texts = [tokenizer.token_bytes(token_id) for token_id in allowed(matcher)]
    assert texts
    assert not any(text[:1].isspace() for text in texts)


def as_object(*members: str) -> str:
    inner = f"{SPACE},{SPACE}".join(members)
    return r"\{" + SPACE + inner + SPACE + r"\}"


MASKED: dict[str, tuple[Constraint, str]] = {
    "pattern": (Regex("[0-9]{2}-(ab|cd)*x?"), "[0-9]{2}-(ab|cd)*x?"),
    "choice": (Choice(("true", "trust", "tr", '{"a": 1}')), r'true|trust|tr|\{"a": 1\}'),
    "object": (
        JsonSchema(
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"enum": ["x y", None]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            }
        ),
        as_object(rf'"a"{SPACE}:{SPACE}-?(?:0|[1-9][0-9]*)', rf'"b"{SPACE}:{SPACE}(?:"x y"|null)'),
    ),
    "array": (
        JsonSchema({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}),
        rf"\[{SPACE}(?:(?:true|false)(?:{SPACE},{SPACE}(?:true|false)){{0,2}}{SPACE})?\]",
    ),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks_have_every_token_that_can_go_on_and_no_other(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    constraint, pattern = MASKED[name]
    whole = regex.compile(pattern)
    ends = end_ids(tokenizer)
    words = {index: tokenizer.token_bytes(index) for index in range(tokenizer.vocab_size) if index not in ends}
    readable = {index: word.decode() for index, word in words.items() if is_text(word)}
    num_checked = 0
    for seed in range(6):
        text = ""
        for token_id, matcher in steps(compiler.compile(constraint), tokenizer, seed):
            text += readable.get(token_id, "")
            if matcher.is_finished:
                break
            expected = {index for index, word in readable.items() if whole.fullmatch(text + word, partial=True)}
            if whole.fullmatch(text):
                expected |= {index for index in ends if index is not None}
            assert allowed(matcher) == expected, f"after {text!r}"
            num_checked += 1
    assert num_checked > 5


def is_text(word: bytes) -> bool:
    try:
        return bool(word.decode())
    except UnicodeDecodeError:
        return False


def test_all_ends_are_allowed_where_the_text_may_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    ends = {index for index in end_ids(tokenizer) if index is not None}
    for end in ends:
        matcher = compiler.compile(Choice(("ab", "abc"))).start()
        push_text(matcher, tokenizer, "a")
        assert not allowed(matcher) & ends
        push_text(matcher, tokenizer, "b")
        assert allowed(matcher) & ends == ends
        assert not matcher.is_finished
        matcher.accept(end)
        assert matcher.is_finished


def test_a_complete_text_is_finished_without_an_end_token(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(Choice(("ab", "abc"))).start()
    push_text(matcher, tokenizer, "abc")
    assert matcher.is_finished
    assert allowed(matcher) == end_ids(tokenizer)
    matcher.accept(min(allowed(matcher)))
    assert matcher.is_finished
    with pytest.raises(TextError, match="after the end"):
        push_text(matcher, tokenizer, "d")


def test_an_end_token_in_the_middle_is_refused(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(Choice(("ab",))).start()
    push_text(matcher, tokenizer, "a")
    with pytest.raises(TextError, match="does not fit"):
        matcher.accept(min(index for index in end_ids(tokenizer) if index is not None))


@pytest.mark.parametrize("text", ["b", "ac"])
def test_a_token_outside_the_mask_is_refused(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(TextError, match="does not fit: the grammar does not allow it"):
        push_text(compiler.compile(Choice(("ab",))).start(), tokenizer, text)


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**40])
def test_an_id_outside_the_vocabulary_is_refused(compiler: GrammarCompiler, token_id: int) -> None:
    with pytest.raises(TextError, match=f"token {token_id} does not fit"):
        compiler.compile(Choice(("ab",))).start().accept(token_id)


def test_every_text_is_allowed_until_the_beginning_came(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    begin = tokenizer.token_to_id("</think>")
    assert begin is not None
    matcher = compiler.compile(Choice(("ab",))).start(begin)
    push_text(matcher, tokenizer, "ab and anything {")
    assert set(range(tokenizer.vocab_size)) - allowed(matcher) == end_ids(tokenizer)
    assert not matcher.is_finished
    matcher.accept(begin)
    assert {tokenizer.token_bytes(token_id)[:1] for token_id in allowed(matcher)} == {b"a"}
    push_text(matcher, tokenizer, "ab")
    assert matcher.is_finished


def test_an_end_token_before_the_beginning_ends_it(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(Choice(("ab",))).start(tokenizer.token_to_id("</think>"))
    matcher.accept(min(index for index in end_ids(tokenizer) if index is not None))
    assert matcher.is_finished


def test_masks_cover_the_rows_of_the_model(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(Regex("(?s:.*)")).start()
    words = matcher.mask()
    assert words is not None
    assert isinstance(words[0], int) and words._type_ is c_uint32
    assert len(words) == (tokenizer.vocab_size + EXTRA_ROWS + 31) // 32
    assert max(allowed(matcher)) < tokenizer.vocab_size
    assert matcher.mask() is words


def test_special_tokens_are_no_text(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(tmp_path)
    ends = [tokenizer.token_to_id("<|end|>")]
    assert ends[0] is not None
    matcher = GrammarCompiler(tokenizer, tokenizer.vocab_size, [ends[0]]).compile(Regex("(?s:.+)")).start()
    assert not any(tokenizer.is_special(token_id) for token_id in allowed(matcher))


def test_matchers_of_one_grammar_are_independent(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(Choice(("ab", "cd")))
    assert grammar is compiler.compile(Choice(("ab", "cd")))
    assert grammar is not compiler.compile(Choice(("cd", "ab", "x")))
    first, second = grammar.start(), grammar.start()
    push_text(first, tokenizer, "a")
    push_text(second, tokenizer, "cd")
    push_text(first, tokenizer, "b")
    assert first.is_finished and second.is_finished


def test_a_fork_goes_its_own_way(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(Choice(("red", "green", "grey")))
    matcher = grammar.start()
    push_text(matcher, tokenizer, "gre")
    before = bytes(matcher.mask())
    fork = matcher.fork()
    assert bytes(fork.mask()) == before
    push_text(fork, tokenizer, "en")
    assert fork.is_finished and not matcher.is_finished and bytes(matcher.mask()) == before
    push_text(matcher, tokenizer, "y")
    assert matcher.is_finished


def test_the_order_of_properties_is_part_of_the_grammar(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for order in (("a", "b"), ("b", "a")):
        schema = {"type": "object", "properties": {name: {"const": 1} for name in order}, "required": list(order)}
        text = walk(compiler.compile(JsonSchema({**schema, "additionalProperties": False})), tokenizer, 0)
        assert tuple(json.loads(text)) == order


def test_threads_share_a_compiler(tokenizer: Tokenizer) -> None:
    compiler = build_compiler(tokenizer)

    def work(seed: int) -> None:
        schema = SCHEMAS[("flat", "nested", "recursive")[seed % 3]]
        text = walk(compiler.compile(JsonSchema(schema)), tokenizer, seed)
        jsonschema.validate(json.loads(text), schema)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(48))) == [None] * 48


def test_a_used_up_grammar_serves_the_next_request(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glint.text.grammar.TRIAL_TEXTS", 0)
    compiler = build_compiler(tokenizer, GrammarLimits(max_lexer_states=60))
    grammar = compiler.compile(Regex("a{100}"))
    used = grammar.start()
    with pytest.raises(TextError, match="limit of lexer states"):
        for _ in range(100):
            allowed(used)
            push_text(used, tokenizer, "a")
    fresh = grammar.start()
    push_text(fresh, tokenizer, 20 * "a")
    assert {tokenizer.token_bytes(token_id)[:1] for token_id in allowed(fresh)} == {b"a"}


def test_states_that_others_used_up_end_no_text(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text needs more than half of the states that there are, and all share them as long as they last."""
    monkeypatch.setattr("glint.text.grammar.TRIAL_TEXTS", 0)
    options = tuple(60 * letter for letter in "abcd")
    compiler = build_compiler(tokenizer, GrammarLimits(max_lexer_states=110))
    grammar = compiler.compile(Regex("a{60}|b{60}|c{60}|d{60}"))
    matchers = [grammar.start() for _ in options]
    for at in range(60):
        for matcher, option in zip(matchers, options, strict=True):
            assert {tokenizer.token_bytes(token_id)[:1] for token_id in allowed(matcher)} <= {b"a", b"b", b"c", b"d"}
            push_text(matcher, tokenizer, option[at])
    for matcher in matchers:
        assert allowed(matcher) == end_ids(tokenizer)


@pytest.mark.parametrize(
    ("rows", "ends", "problem"), [(10, [0], "rows"), (10**6, [], "at least one"), (10**6, [-1], "-1")]
)
def test_a_model_that_does_not_fit_is_refused(tokenizer: Tokenizer, rows: int, ends: list[int], problem: str) -> None:
    with pytest.raises(TextError, match=problem):
        GrammarCompiler(tokenizer, rows, ends)


def test_importing_grammars_does_not_load_the_library() -> None:
    code = "import sys, glint.text.grammar; assert not {'llguidance', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
