"""What routes ask for, in the words of no interface."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from glint.sampling import SamplingParams
from glint.text.grammar import Constraint
from glint.text.tools import Tool


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may call tools: "auto", "none" or "required"; `name` leaves it only one."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    allows_several: bool = True


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation with the tools that are offered, whichever interface it came through."""

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    enable_thinking: bool | None = None
    clear_thinking: bool | None = None


@dataclass(frozen=True)
class TextPrompt:
    """A text to go on with, or its tokens."""

    content: str | Sequence[int]


@dataclass(frozen=True)
class GenerationRequest:
    """What a route asks for, in the words of no interface. `format_field` is the field that named the constraint.

    A lower `priority` goes before other requests of the same key.
    """

    prompt: ChatPrompt | TextPrompt
    params: SamplingParams
    deadline_seconds: float
    constraint: Constraint | None = None
    format_field: str = "response_format"
    priority: int = 0

    @property
    def needs_worker(self) -> bool:
        """Whether there is text to make tokens of or a grammar to compile; token ids are taken as they are."""
        has_text = isinstance(self.prompt, ChatPrompt) or isinstance(self.prompt.content, str)
        return has_text or self.constraint is not None
