"""What the next turn of a chat can share with this one, against the prompt that the template makes of the next turn."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from glint.engine.reuse import Reuse
from glint.sampling import SamplingParams
from glint.server.auth import Tenant
from glint.server.generation.prepare import encode_chat, prepare
from glint.server.generation.request import ChatPrompt, GenerationRequest, TextPrompt
from glint.server.state import ServerState
from glint.text.chat import drops_reasoning
from glint.text.grammar import GrammarCompiler, Regex
from glint.text.tokenizer import Tokenizer
from glint.text.tools import Tool
from tests.pure.chat_layouts import GLM_46
from tests.pure.text_folder import GLM_TEMPLATE, write_tokenizer

LAST_USER = """{%- set last = namespace(user=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
"""
KEPT = "(thought.strip() if loop.index0 > last.user else '')"
GLM_46_DROPS = LAST_USER + GLM_46.replace("+ thought.strip() +", f"+ {KEPT} +")
TEMPLATES = {"glm47": GLM_TEMPLATE, "glm46": GLM_46_DROPS, "keeps": GLM_46}

USER = {"role": "user", "content": "What is the weather like?"}
ANSWER = {"role": "assistant", "content": "It rains.", "reasoning_content": "Let me think about it."}
CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
CALLING = {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "noon"}
SYSTEM = {"role": "system", "content": "Write <think> if you like."}
NOW = Tool("now", "", {"type": "object"})

CONVERSATIONS = {
    "first": [USER],
    "second": [SYSTEM, USER, ANSWER, USER],
    "in a loop": [USER, ANSWER, USER, CALLING, RESULT],
    "long in a loop": [SYSTEM, USER, CALLING, RESULT, ANSWER, USER, CALLING, RESULT, CALLING, RESULT],
}


class Layout:
    """A server's state as far as a chat is prepared, on one layout."""

    def __init__(self, folder: Path, layout: str) -> None:
        self.tokenizer = Tokenizer(write_tokenizer(folder, TEMPLATES[layout]))
        self.name = layout
        known = {"tokenizer": self.tokenizer, "max_model_len": 4096, "allows_special_tokens": False}
        compiler = GrammarCompiler(self.tokenizer, self.tokenizer.vocab_size, self.tokenizer.eos_token_ids)
        self.state = cast(ServerState, SimpleNamespace(**known, compiler=compiler, check_length=lambda *_: None))

    def prepared(self, messages: list[Any], constraint: Any = None, **fields: Any) -> tuple[list[int], Reuse | None]:
        """The tokens and the reuse of a chat."""
        request = GenerationRequest(ChatPrompt(messages, **fields), SamplingParams(), 60.0, constraint)
        made = prepare(self.state, request, Tenant(0)).engine_request
        return list(made.prompt_tokens), made.reuse

    def shared(self, messages: list[Any], **fields: Any) -> int:
        """How many tokens of a chat the prompt of its next turn begins with."""
        tokens, _ = self.prepared(messages, **fields)
        following = encode_chat(self.state, ChatPrompt([*messages, ANSWER, USER], **fields))
        pairs = enumerate(zip(tokens, following, strict=False))
        return next((index for index, (token, other) in pairs if token != other), len(tokens))


@pytest.fixture(scope="module")
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    """One of the layouts."""
    return Layout(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("layout", ["glm47", "glm46"], indirect=True)
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [(), (NOW,)])
def test_reuse_ends_where_the_next_turn_differs(layout: Layout, name: str, tools: tuple[Tool, ...]) -> None:
    """The tag that opens the thinking counts as shared, which it is in one of the layouts."""
    messages = CONVERSATIONS[name]
    tokens, reuse = layout.prepared(messages, tools=tools)
    assert reuse is not None
    assert reuse.num_tokens == layout.shared(messages, tools=tools) + (layout.name == "glm47")
    assert (reuse.num_tokens == len(tokens)) == ("loop" not in name)
    assert reuse.unless_token == layout.tokenizer.token_to_id("<tool_call>")


@pytest.mark.parametrize("layout", ["glm47"], indirect=True)
@pytest.mark.parametrize("fields", [{"clear_thinking": False}, {"enable_thinking": False}])
@pytest.mark.parametrize("name", ["first", "second"])
def test_next_turn_that_repeats_the_answer_shares_all(layout: Layout, name: str, fields: dict[str, bool]) -> None:
    tokens, reuse = layout.prepared(CONVERSATIONS[name], **fields)
    assert reuse is None
    assert layout.shared(CONVERSATIONS[name], **fields) == len(tokens)


@pytest.mark.parametrize("layout", ["glm47"], indirect=True)
def test_template_drops_thinking_unless_told(layout: Layout) -> None:
    assert [drops_reasoning(layout.tokenizer, clears) for clears in (None, True, False)] == [True, True, False]


@pytest.mark.parametrize("layout", ["keeps"], indirect=True)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_template_that_keeps_all_thinking_shares_all(layout: Layout, name: str) -> None:
    tokens, reuse = layout.prepared(CONVERSATIONS[name])
    assert reuse is None
    assert layout.shared(CONVERSATIONS[name]) == len(tokens)


@pytest.mark.parametrize("layout", ["glm47", "glm46"], indirect=True)
def test_thinking_opened_for_a_format_is_no_more_shared(layout: Layout) -> None:
    tokens, reuse = layout.prepared([USER], Regex("a+"))
    assert reuse is not None and reuse.num_tokens == len(tokens)
    assert tokens[-1] == layout.tokenizer.token_to_id("<think>")


@pytest.mark.parametrize("layout", ["glm47"], indirect=True)
def test_message_that_goes_on_is_shared_up_to_its_thinking(layout: Layout) -> None:
    _, begun = layout.prepared([USER])
    for message in (ANSWER, ANSWER | {"content": ""}):
        assert layout.prepared([USER, message], continues=True)[1] == begun
    assert layout.prepared([USER, ANSWER | {"reasoning_content": ""}], continues=True)[1] is None


@pytest.mark.parametrize("layout", ["glm47"], indirect=True)
def test_plain_prompt_shares_all(layout: Layout) -> None:
    request = GenerationRequest(TextPrompt("<|assistant|><think>"), SamplingParams(), 60.0)
    assert prepare(layout.state, request, Tenant(0)).engine_request.reuse is None
