"""Grammars over the vocabulary of the sample model, as it is and with the tags of tool calls as added tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from glint.sample.convert import tokenizer_documents
from glint.sample.gguf import GgufFile
from glint.text.grammar import Constraint, GrammarCompiler, JsonObject, JsonSchema, Regex, ToolCalls
from glint.text.output import OutputStart, parse_output
from glint.text.tokenizer import Tokenizer
from glint.text.tools import Tool
from tests.pure.grammar_walk import TAGS, steps
from tests.pure.sample_source import sample_gguf

__all__ = ["sample_gguf"]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = (Tool("now"), Tool("weather", "The weather.", SCHEMA, True))
CALL = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>São Paulo, center</arg_value>"
    "<arg_key>days</arg_key><arg_value>12</arg_value></tool_call>"
)
ACCEPTED: dict[str, tuple[Constraint, str]] = {
    "object": (JsonObject(), '{"name": "Ada Lovelace", "list": [1, 2.5e3, {"deep": null}], "ü": ""}'),
    "indented": (JsonSchema(SCHEMA), '{\n  "city": "Köln",\n  "days": 3\n}'),
    "compact": (JsonSchema(SCHEMA), '{"city":"Rio","days":-3}'),
    "regex": (Regex("[A-Z][a-z ]+[.]"), "The red fox."),
    "call": (ToolCalls(TOOLS, True, False), CALL),
    "calls": (ToolCalls(TOOLS, True, True), CALL + "<tool_call>now</tool_call>"),
    "text and call": (ToolCalls(TOOLS, False, True), "I will look it up.\n" + CALL),
}


@pytest.fixture(scope="module", params=["spelled", pytest.param("tokens", marks=pytest.mark.slow)])
def tokenizer(request: pytest.FixtureRequest, sample_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("folder")
    with GgufFile(sample_gguf) as file:
        for name, document in tokenizer_documents(file).items():
            (folder / name).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    if request.param == "spelled":
        return Tokenizer(folder)
    copy = tmp_path_factory.mktemp("copy") / "folder"
    shutil.copytree(folder, copy)
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    fast.save(str(copy / "tokenizer.json"))
    return Tokenizer(copy)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + 187, tokenizer.eos_token_ids)


@pytest.mark.parametrize("name", ACCEPTED)
def test_texts_as_the_tokenizer_writes_them_are_accepted(
    compiler: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    constraint, text = ACCEPTED[name]
    matcher = compiler.compile(constraint).start()
    for token_id in tokenizer.encode(text):
        words = matcher.mask()
        assert words is not None
        assert words[token_id // 32] >> token_id % 32 & 1
        matcher.accept(token_id)
    matcher.accept(tokenizer.eos_token_ids[0])
    assert matcher.is_finished


def test_random_calls_fit_their_schema(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(ToolCalls(TOOLS, True, True))
    for seed in range(3):
        tokens = [token_id for token_id, _ in steps(grammar, tokenizer, seed)]
        output = parse_output(tokenizer.decode(tokens), OutputStart.CONTENT, TOOLS)
        assert output.calls and not output.content
        for call in output.calls:
            jsonschema.validate(json.loads(call.arguments), dict(TOOLS[1].parameters) if call.name == "weather" else {})
