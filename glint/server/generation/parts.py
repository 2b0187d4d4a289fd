"""Output as numbered parts, as the Responses and Messages APIs send it: reasoning, text and tool calls in order."""

import secrets
from collections.abc import Iterable
from typing import Any, Literal, Protocol

import msgspec

from glint.server.generation.generation import Delta
from glint.text.output import ContentText, ReasoningText, ToolCallArguments, ToolCallBegun

PartKind = Literal["reasoning", "text", "call"]
PartStatus = Literal["in_progress", "completed", "incomplete"]
WireEvent = dict[str, Any]


class Part:
    """One part of the output. Its text grows until the part is closed; the text of a call is its arguments as JSON."""

    def __init__(self, index: int, kind: PartKind, name: str) -> None:
        self.index = index
        self.kind = kind
        self.name = name
        self.id = secrets.token_hex(12)
        self.status: PartStatus = "in_progress"
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def add(self, text: str) -> None:
        """Append text."""
        self._pieces.append(text)


class PartWriter(Protocol):
    """Writes the events of a stream for one API."""

    def opened(self, part: Part) -> list[WireEvent]:
        """The events of a part that begins; it has no text yet."""

    def grown(self, part: Part, text: str) -> list[WireEvent]:
        """The events of text that was added to the part."""

    def closed(self, part: Part) -> list[WireEvent]:
        """The events of a part that is complete; its status says whether it was cut."""


class Parts:
    """Collects the output of the one choice of a request as parts. The writer makes the events of each change.

    One part is open at a time. A tool call stays open until the next part begins or the output ends, so that a cut does
    not depend on how the output was split into steps. Where the output reached its length, its last part is cut.
    """

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer
        self._open: Part | None = None
        self.all: list[Part] = []
        self.last: Delta | None = None

    def add_delta(self, delta: Delta) -> list[WireEvent]:
        """Add the output of one step; returns the events of the stream."""
        written: list[WireEvent] = []
        for event in delta.events:
            match event:
                case ContentText(text=text):
                    written += self._add("text", text)
                case ReasoningText(text=text):
                    written += self._add("reasoning", text)
                case ToolCallBegun(name=name):
                    written += self._begin("call", name)
                case ToolCallArguments(text=text):
                    written += self._add("call", text)
        if delta.finish_reason is not None:
            self.last = delta
            written += self._close("incomplete" if delta.finish_reason == "length" else "completed")
        return written

    def _add(self, kind: PartKind, text: str) -> list[WireEvent]:
        if not text:
            return []
        written: list[WireEvent] = []
        if self._open is None or self._open.kind != kind:
            written = self._begin(kind)
        part = self.all[-1]
        part.add(text)
        return written + self._writer.grown(part, text)

    def _begin(self, kind: PartKind, name: str = "") -> list[WireEvent]:
        written = self._close("completed")
        self._open = Part(len(self.all), kind, name)
        self.all.append(self._open)
        return written + self._writer.opened(self._open)

    def _close(self, status: PartStatus) -> list[WireEvent]:
        part, self._open = self._open, None
        if part is None:
            return []
        part.status = status
        return self._writer.closed(part)


def encode_events(events: Iterable[WireEvent]) -> bytes:
    """Events as server-sent events, each named by its type."""
    lines = [b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events]
    return b"".join(lines)
