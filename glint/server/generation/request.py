"""What a route asks of the engine, in the same form for every API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from glint.sampling import SamplingParams
from glint.text.grammar import Constraint
from glint.text.tools import Tool


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may call tools: "auto", "none" or "required". With `name` it may call only that tool."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    allows_several: bool = True


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation and the tools that the model may call. With `continues` the model goes on in the last message."""

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    enable_thinking: bool | None = None
    clear_thinking: bool | None = None
    continues: bool = False


@dataclass(frozen=True)
class TextPrompt:
    """A text that the model continues, or its tokens. A text gets the tokenizer's special tokens unless turned off."""

    content: str | Sequence[int]
    add_special_tokens: bool = True


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt with its sampling, deadline and constraint. `format_field` is the field that named the constraint.

    The engine runs requests of one key with a lower `priority` first. Requests with different `cache_salt` never share
    pages of the prefix cache.
    """

    prompt: ChatPrompt | TextPrompt
    params: SamplingParams
    deadline_seconds: float
    constraint: Constraint | None = None
    format_field: str = "response_format"
    priority: int = 0
    cache_salt: str | None = None

    @property
    def needs_worker(self) -> bool:
        """Whether a worker thread prepares the request: it has text to tokenise or a grammar to compile."""
        has_text = isinstance(self.prompt, ChatPrompt) or isinstance(self.prompt.content, str)
        return has_text or self.constraint is not None
