"""Patterns that compile and cannot be followed for long are refused when they are asked for; usual ones are taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from glint.errors import TextError
from glint.sample.convert import tokenizer_documents
from glint.sample.gguf import GgufFile
from glint.text.grammar import Constraint, GrammarCompiler, JsonSchema, Regex, ToolCalls
from glint.text.tokenizer import Tokenizer
from glint.text.tools import Tool
from tests.pure.grammar_walk import steps
from tests.pure.sample_source import sample_gguf

__all__ = ["sample_gguf"]

FAILING = (
    r".*a.{40}b",
    r"((a{1,1000}){1,1000}){1,1000}",
    r"(\w+\s?){1,200}",
    r".*[a-m].{30}[n-z]",
)
FAILING_IN_JSON = (r".*a.{40}b", r"(.{0,5000}x){0,5000}", r".{0,3000}", r"[^\n]{1,500}")
USUAL = (
    r"[\w.+-]+@[\w-]+\.[\w.]{2,}",
    r"https?://[^\s]{1,200}",
    r"\d{4}-\d{2}-\d{2}",
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    r"([A-Z][a-z]+ ?){1,10}",
    r"[\s\S]{1,2000}",
    r"(- .{1,80}\n){1,20}",
    r"(\w+[ ,.]?){5,50}",
    r"([^.!?]{10,120}[.!?] ?){1,5}",
    r"[A-Za-z0-9 _.,!?'\"()-]{1,1000}",
    r"(\d+(\.\d+)?,? ?){1,100}",
)


@pytest.fixture(scope="module")
def tokenizer(sample_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("folder")
    with GgufFile(sample_gguf) as file:
        for name, document in tokenizer_documents(file).items():
            (folder / name).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def string_of(pattern: str) -> JsonSchema:
    return JsonSchema({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}})


@pytest.mark.parametrize(
    "constraint", [*map(Regex, FAILING), *map(string_of, FAILING_IN_JSON)], ids=[*FAILING, *FAILING_IN_JSON]
)
def test_patterns_that_fail_in_the_middle_of_a_text_are_refused_before_it(
    compiler: GrammarCompiler, constraint: Constraint
) -> None:
    with pytest.raises(
        TextError, match=r"cannot be used as a grammar: it is too complex: .* limit of .*simpler pattern"
    ):
        compiler.compile(constraint)


@pytest.mark.parametrize(
    "pattern", [*USUAL[:3], *(pytest.param(pattern, marks=pytest.mark.slow) for pattern in USUAL[3:])]
)
def test_usual_patterns_are_taken_and_go_on(compiler: GrammarCompiler, tokenizer: Tokenizer, pattern: str) -> None:
    for constraint in (Regex(pattern), string_of(f"^{pattern}$")):
        grammar = compiler.compile(constraint)
        for _, (token_id, _) in zip(range(100), steps(grammar, tokenizer, 5), strict=False):
            assert token_id < tokenizer.vocab_size


def test_a_tool_with_such_a_pattern_is_refused_if_strict_and_left_free_if_not(compiler: GrammarCompiler) -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^.*a.{40}b$"}}}
    with pytest.raises(TextError, match="the schema of tool 'f' cannot be used as a grammar: it is too complex"):
        compiler.compile(ToolCalls((Tool("f", None, parameters, True),), True, False))
    assert compiler.compile(ToolCalls((Tool("f", None, parameters, False),), True, False)).start().mask() is not None
