"""Grammars that clients write, in Lark and in GBNF: what fits, what does not, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import regex

from glint.errors import TextError
from glint.text.grammar import GrammarCompiler, GrammarLimits, WrittenGrammar
from glint.text.tokenizer import Tokenizer
from tests.fuzz.hostile import GRAMMARS
from tests.pure.grammar_walk import build_compiler, build_tokenizer, walk

LARK = """
start: sum (" = " NUMBER)?
sum: NUMBER (("+" | "-") NUMBER){1,3}  // terms
NUMBER: /[1-9][0-9]{0,2}/
"""
GBNF = """
# a sum
root ::= sum (" = " number)?
sum  ::= number (("+" | "-") number){1,3}
number ::= [1-9] [0-9]{0,2}
"""
FORM = r"[1-9][0-9]{0,2}([+-][1-9][0-9]{0,2}){1,3}( = [1-9][0-9]{0,2})?"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Tokens that span the joints of what grammars say."""
    return build_tokenizer(Path(tmp_path_factory.mktemp("tokenizer")), ("<think>", "</think>"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    """A compiler for it."""
    return build_compiler(tokenizer)


@pytest.mark.parametrize("source", [LARK, GBNF])
def test_random_texts_fit_the_grammar(tokenizer: Tokenizer, compiler: GrammarCompiler, source: str) -> None:
    grammar = compiler.compile(WrittenGrammar(source))
    texts = {walk(grammar, tokenizer, seed).decode() for seed in range(12)}
    assert len(texts) > 5 and all(regex.fullmatch(FORM, text) for text in texts), texts


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("start: a", "the grammar cannot be used"),
        ("hello", "the grammar cannot be used"),
        ('root ::= "a', "GBNF"),
        ('root ::= "a\\', "GBNF"),
        ("root ::= " + "(" * 5000, "GBNF"),
        ("root ::= item", "not found"),
        ('start: %json {"type": "object"}', "%json"),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "%llguidance"),
        ("start: <|user|>", "<|user|>"),
        ('start: "a" // "\n | <[5]>', "<[5]>"),
        ("start: @other", "@other"),
        ('start: "a"\n%declare B', "%declare"),
        ("start: A\nA: /(?=a)b/", "the grammar cannot be used"),
        ("start: A\nA: /" + 2_000 * "(" + "a" + 2_000 * ")" + "/", "the grammar cannot be used"),
        ("start: " + 50 * "(" + '"a"' + 50 * ")", "nested"),
        ("start: A\nA: /a*/ & /b*/", "&"),
        ("start: r0\n" + "".join(f"r{index}: r{index + 1}\n" for index in range(300)), "301 rules"),
        ('start: "\ud800"', "surrogate"),
        ('start: "' + "a" * 70_000 + '"', "16384"),
    ],
)
def test_what_is_no_grammar_is_refused(compiler: GrammarCompiler, source: str, words: str) -> None:
    with pytest.raises(TextError) as refused:
        compiler.compile(WrittenGrammar(source))
    assert words in str(refused.value) and len(str(refused.value)) < 600


@pytest.mark.parametrize("source", GRAMMARS)
def test_a_hostile_grammar_compiles_or_is_refused(compiler: GrammarCompiler, source: str) -> None:
    try:
        mask = compiler.compile(WrittenGrammar(source)).start().mask()
    except TextError as refused:
        assert "the grammar" in str(refused) and len(str(refused)) < 600
    else:
        assert any(mask)


def test_quoted_signs_are_text(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    source = 'start: "<a> %json @b" | /<b>[%]@/  // <c> %json\n%import common.WS\n%ignore WS'
    assert walk(compiler.compile(WrittenGrammar(source)), tokenizer, 1).decode().strip() in ("<a> %json @b", "<b>%@")


def test_the_size_is_limited_by_its_bytes(tokenizer: Tokenizer) -> None:
    small = build_compiler(tokenizer, GrammarLimits(max_written_bytes=13))
    small.compile(WrittenGrammar('start: "abcd"'))
    with pytest.raises(TextError, match="14 bytes"):
        small.compile(WrittenGrammar('start: "abcü"'))
