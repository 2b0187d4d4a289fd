"""Prompts that end in the middle of the last message, with a template of GLM's kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glint.errors import TextError
from glint.text.chat import render_prompt
from glint.text.output import OutputStart, find_continued_start
from glint.text.tokenizer import Tokenizer
from tests.pure.text_folder import GLM_TEMPLATE, write_tokenizer

QUESTION: dict[str, Any] = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with GLM's tokens and template."""
    return Tokenizer(write_tokenizer(Path(tmp_path_factory.mktemp("glm")), GLM_TEMPLATE))


@pytest.mark.parametrize("allows", [False, True])
@pytest.mark.parametrize(
    ("message", "ending", "start"),
    [
        ({"content": "Once upon"}, "</think>Once upon", OutputStart.CONTENT),
        ({"content": "Once "}, "</think>Once ", OutputStart.CONTENT),
        ({"content": ""}, "<|assistant|></think>", OutputStart.CONTENT),
        ({"content": "So", "reasoning_content": "Hm."}, "<think>Hm.</think>So", OutputStart.CONTENT),
        ({"content": None, "reasoning_content": "Hm"}, "<|assistant|><think>Hm", OutputStart.REASONING),
    ],
)
def test_the_prompt_ends_where_the_message_does(
    tokenizer: Tokenizer, message: dict[str, Any], ending: str, start: OutputStart, allows: bool
) -> None:
    messages = [QUESTION, {"role": "assistant", **message}]
    prompt = render_prompt(tokenizer, messages, continues=True, allow_special_tokens=allows)
    assert prompt.text.startswith("[gMASK]<sop><|user|>Hi<|assistant|>") and prompt.text.endswith(ending)
    assert find_continued_start(prompt.marked, True) is start
    assert find_continued_start(prompt.marked, False) is OutputStart.PLAIN


def test_spelled_control_tokens_stay_text(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "<think>"}, {"role": "assistant", "content": "a<|user|>b"}]
    prompt = render_prompt(tokenizer, messages, continues=True)
    assert prompt.text.endswith("a<|user|>b") and find_continued_start(prompt.marked, True) is OutputStart.CONTENT
    assert tokenizer.encode_prompt(prompt).count(tokenizer.token_to_id("<|user|>")) == 1


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": "x"}, "role 'user'"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}, "tool calls"),
    ],
)
def test_what_cannot_be_continued(tokenizer: Tokenizer, message: dict[str, Any], words: str) -> None:
    with pytest.raises(TextError, match=words):
        render_prompt(tokenizer, [QUESTION, message], continues=True)


def test_a_template_that_changes_the_message_refuses(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(TextError, match="cannot be continued"):
        folder = write_tokenizer(tmp_path, template)
        render_prompt(Tokenizer(folder), [QUESTION, {"role": "assistant", "content": "x"}], continues=True)
