"""The parser of a model's output as it comes: reasoning, content and tool calls.

One parser reads the formats of GLM-4.5, 4.6 and 4.7, which differ only in line ends between tags. It works on text
pieces of any size; the events of all pieces, joined, do not depend on where the text was cut. Its cost is linear in
the text, and no text makes it raise.

Rules, where the format leaves them open:

- Reasoning ends at `</think>` or at a call, and keeps all its bytes; `<think>` inside it is dropped. Reasoning that
  never ends stays reasoning, and the content is empty.
- Line ends between `</think>` and the content are dropped, and so is a stretch of content that holds only space and
  touches a call or the reasoning. All other content is passed on untouched, at once.
- `<think>` opens reasoning where no content was written since the start, the last `</think>` or the last call; later
  it is content. `</think>` in content is dropped, unless it closes a `<think>` that was passed on as content.
- A call of a tool that is not declared is passed on as content, tags and all. `<tool_call>` that no name follows is
  ordinary text of the reasoning or content it stands in. `</tool_call>` in content is dropped if nothing opened it.
- A tag inside a value counts only where the format lets it stand (see `CallReader`), so values may hold tags.
- What a model leaves out is filled in: a key or value without its opening or closing tag is read as far as that is
  clear, a value without a key gets the empty key, a key without a value is dropped. A key that comes twice counts once.

An output may end anywhere, and no part of a tag is ever taken for text because of it:

- A call that was cut gives its name and the arguments as far as they came, closed to a JSON object: the whole values
  unchanged, the value that was cut as far as its text came (as a string where that text is not JSON of its type), a
  key without a value not at all. The finish reason, "length", tells that it was cut.
- A cut inside the name gives no call and no text; so does `<tool_call>` with nothing behind it. A name counts as whole
  where space or a tag follows it, or where no other declared tool's name begins with it.
- The beginning of a tag at the end of a call is dropped wherever the tag could stand there. At the end of reasoning or
  content it is dropped where the output was cut, and kept where the model itself ended there or something else follows.
- Where no tools are declared, calls are content and a cut one is as well.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from itertools import groupby

from glint.text.arguments import ArgumentSchema, ArgumentWriter
from glint.text.tags import THINK_TAGS, Tag, TagScanner
from glint.text.tool_call import CallReader
from glint.text.tools import Tool

MAX_NAME = 256
NO_SCHEMA = ArgumentSchema({})


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegun:
    """A call of a declared tool; `index` counts the calls of this answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments; all texts of one call, joined, are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The call is over: by its closing tag, by what followed, or by the end of the output."""

    index: int


OutputEvent = ReasoningText | ContentText | ToolCallBegun | ToolCallArguments | ToolCallEnded


class OutputStart(StrEnum):
    """Where the output begins, by the end of the prompt.

    REASONING: inside reasoning. CONTENT: after it. UNDECIDED: the model itself may open it, after any space.
    PLAIN: the model does not know the think tags; they are ordinary text.
    """

    REASONING = "reasoning"
    CONTENT = "content"
    UNDECIDED = "undecided"
    PLAIN = "plain"


def find_start(rendered_prompt: str, has_think_token: bool) -> OutputStart:
    """Where the output of a model begins that was given this prompt; space at the prompt's end does not count."""
    if not has_think_token:
        return OutputStart.PLAIN
    prompt = rendered_prompt.rstrip()
    if prompt.endswith(Tag.THINK):
        return OutputStart.REASONING
    return OutputStart.CONTENT if prompt.endswith(Tag.THINK_END) else OutputStart.UNDECIDED


def find_continued_start(rendered_prompt: str, has_think_token: bool) -> OutputStart:
    """Where the output of a model begins that goes on in the middle of a message: in its reasoning or behind it."""
    if not has_think_token:
        return OutputStart.PLAIN
    is_thinking = rendered_prompt.rfind(Tag.THINK) > rendered_prompt.rfind(Tag.THINK_END)
    return OutputStart.REASONING if is_thinking else OutputStart.CONTENT


def merge_texts(events: list[OutputEvent]) -> list[OutputEvent]:
    """The events with neighbouring texts of the same kind, and of the same call, joined."""
    merged: list[OutputEvent] = []
    for _, group in groupby(events, key=lambda event: (type(event), getattr(event, "index", None))):
        first, *others = group
        if others and isinstance(first, ReasoningText | ContentText | ToolCallArguments):
            texts = (event.text for event in others if isinstance(event, type(first)))
            first = replace(first, text="".join([first.text, *texts]))
        merged.append(first)
    return merged


class State(Enum):
    """Where the parser stands: NAME is behind `<tool_call>`, CALL behind the name."""

    REASONING = auto()
    CONTENT = auto()
    NAME = auto()
    CALL = auto()


class CallUse(Enum):
    """The use of a call: it is reported, passed on as content, or dropped."""

    REPORT = auto()
    ECHO = auto()
    DROP = auto()


class OutputParser:
    """Reads one answer of a model, piece by piece.

    `push` gives the events that are certain after a piece, `finish` the rest: it closes what is open, so that the
    arguments of every call are a JSON object. With `discards_calls` calls are dropped, declared or not.
    """

    def __init__(self, start: OutputStart, tools: Sequence[Tool], discards_calls: bool = False) -> None:
        self._scanner = TagScanner(knows_think=start is not OutputStart.PLAIN)
        self._tools = {tool.name: tool for tool in tools}
        self._schemas: dict[str, ArgumentSchema] = {}
        self._discards_calls = discards_calls
        self._events: list[OutputEvent] = []
        self._num_calls = 0
        self._open_content(is_after_think=start is OutputStart.CONTENT)
        self._keeps_blank = start in (OutputStart.UNDECIDED, OutputStart.PLAIN)
        self._state = State.REASONING if start is OutputStart.REASONING else State.CONTENT
        self._outer = self._state
        self._use = CallUse.DROP
        self._name: list[str] = []
        self._name_length = 0
        self._call = CallReader(NO_SCHEMA)

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is certain."""
        return self._state is State.REASONING

    def push(self, text: str) -> list[OutputEvent]:
        """The events that this piece of text makes certain."""
        for token in self._scanner.push(text):
            self._read(token)
        return self._take_events()

    def finish(self, followed_by: str | None = "") -> list[OutputEvent]:
        """The events that the end of the output makes certain; call it once, last.

        `followed_by` is the text behind the end that is not shown: a stop string, nothing where the model itself
        ended, None where the output was cut and nobody knows.
        """
        tail = self._scanner.finish()
        if self._state is State.NAME:
            tail = self._finish_name(tail)
        is_read_as_call = self._state is State.CALL and self._use is not CallUse.ECHO
        if tail and not is_read_as_call and not self._is_cut_tag(tail, followed_by):
            self._read(tail)
        if self._state is State.CALL:
            self._call.finish(tail)
            self._end_call()
        elif self._state is State.CONTENT and self._keeps_blank:
            self._add(ContentText("".join(self._blank)))
        return self._take_events()

    def _take_events(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return merge_texts(events) if len(events) > 1 else events

    def _read(self, token: str) -> None:
        """Pass a tag or a text from state to state until one has used it up."""
        while not STEPS[self._state](self, token):
            pass

    def _add(self, event: ReasoningText | ContentText | ToolCallArguments) -> None:
        if event.text:
            self._events.append(event)

    def _open_content(self, is_after_think: bool) -> None:
        self._state = State.CONTENT
        self._is_at_edge = True
        self._blank: list[str] = []
        self._drops_line_ends = is_after_think
        self._keeps_blank = False
        self._is_think_shown = False
        self._is_call_shown = False

    def _add_content(self, text: str) -> None:
        if self._is_at_edge:
            self._blank.append(text)
            if not text.strip():
                return
            text = "".join(self._blank)
            self._blank = []
            self._is_at_edge = self._keeps_blank = False
            if self._drops_line_ends:
                text = text.lstrip("\r\n")
        self._add(ContentText(str(text)))

    def _read_reasoning(self, token: str) -> bool:
        if token is Tag.THINK_END:
            self._open_content(is_after_think=True)
        elif token is Tag.CALL:
            self._begin_name()
        elif token is not Tag.THINK:
            self._add(ReasoningText(str(token)))
        return True

    def _read_content(self, token: str) -> bool:
        if token is Tag.CALL:
            self._begin_name()
        elif token is Tag.CALL_END:
            if self._is_call_shown:
                self._add_content(token)
            self._is_call_shown = False
        elif token is Tag.THINK and self._is_at_edge:
            self._state = State.REASONING
        elif token is Tag.THINK_END and not self._is_think_shown:
            if self._is_at_edge:
                self._open_content(is_after_think=True)
        else:
            if token in THINK_TAGS:
                self._is_think_shown = token is Tag.THINK
            self._add_content(token)
        return True

    def _begin_name(self) -> None:
        self._outer = self._state
        self._state = State.NAME
        self._name = []
        self._name_length = 0

    def _read_name(self, token: str) -> bool:
        if not isinstance(token, Tag):
            self._name.append(token)
            self._name_length += len(token)
            if self._name_length > MAX_NAME:
                self._give_up_name()
            return True
        if token in THINK_TAGS:
            self._give_up_name()
            return False
        name, key = self._match_name("".join(self._name).strip(), token)
        is_call = name in self._tools or self._discards_calls
        if not is_call and (token is Tag.CALL or not name or name.split() != [name]):
            self._give_up_name()
            return False
        self._begin_call(name, key)
        return False

    def _match_name(self, written: str, tag: Tag) -> tuple[str, str | None]:
        """The tool's name, and the first key where the model forgot the tag that opens it."""
        if written not in self._tools and tag is Tag.KEY_END:
            for name in sorted(self._tools, key=len, reverse=True):
                key = written.removeprefix(name).strip()
                if written.startswith(name) and ArgumentWriter(self._find_schema(name)).can_follow(key):
                    return name, key
        return written, None

    def _is_cut_tag(self, tail: str, followed_by: str | None) -> bool:
        """Whether text at the end of reasoning or content is the beginning of a tag that was cut."""
        if followed_by == "":
            return False
        tags = Tag if self._tools or self._discards_calls else THINK_TAGS
        text = tail + (followed_by or "")
        return any(tag.startswith(text[: len(tag)]) for tag in tags)

    def _finish_name(self, tail: str) -> str:
        """Begin or drop the call whose name the output ended in; gives the tail where it is no call, but text."""
        written = "".join(self._name)
        name = written.strip()
        is_whole = bool(tail) or written != written.rstrip()
        is_whole = is_whole or not any(other != name and other.startswith(name) for other in self._tools)
        if self._discards_calls or (name in self._tools and is_whole):
            self._begin_call(name, None)
        elif self._can_become_call(name):
            self._state = self._outer
            self._keeps_blank = False
        else:
            self._give_up_name()
            return tail
        return ""

    def _can_become_call(self, written: str) -> bool:
        """Whether more text could have made this the name of a declared tool, perhaps with its first key."""
        for name in self._tools:
            key = written.removeprefix(name).strip()
            if name.startswith(written):
                return True
            if written.startswith(name) and ArgumentWriter(self._find_schema(name)).can_begin(key):
                return True
        return False

    def _give_up_name(self) -> None:
        """The text read so far is no call: it belongs to the text around it."""
        text = "".join(self._name)
        self._state = self._outer
        if not self._discards_calls:
            text = Tag.CALL + text
            self._is_call_shown = True
        if self._state is State.REASONING:
            self._add(ReasoningText(text))
        else:
            self._add_content(text)

    def _find_schema(self, name: str) -> ArgumentSchema:
        if name in self._tools and name not in self._schemas:
            self._schemas[name] = ArgumentSchema(self._tools[name].parameters)
        return self._schemas.get(name, NO_SCHEMA)

    def _choose_use(self, name: str) -> CallUse:
        """The use of a call of this name: the one place that decides about tools that are not declared."""
        if self._discards_calls:
            return CallUse.DROP
        return CallUse.REPORT if name in self._tools else CallUse.ECHO

    def _begin_call(self, name: str, first_key: str | None) -> None:
        self._use = self._choose_use(name)
        self._call = CallReader(self._find_schema(name), first_key)
        if self._outer is State.REASONING:
            self._open_content(is_after_think=True)
        if self._use is CallUse.ECHO:
            self._add_content(Tag.CALL + "".join(self._name))
        elif self._use is CallUse.REPORT:
            self._events.append(ToolCallBegun(self._num_calls, name))
        self._state = State.CALL

    def _read_call(self, token: str) -> bool:
        is_used = self._call.read(token)
        if self._use is CallUse.ECHO:
            if is_used:
                self._add_content(token)
        elif not is_used and not isinstance(token, Tag):
            self._end_call()
            self._read(token.lstrip())
            return True
        self._report_arguments()
        if self._call.is_over:
            self._end_call()
        return is_used

    def _report_arguments(self) -> None:
        text = self._call.take_json()
        if self._use is CallUse.REPORT:
            self._add(ToolCallArguments(self._num_calls, text))

    def _end_call(self) -> None:
        self._report_arguments()
        if self._use is CallUse.REPORT:
            self._events.append(ToolCallEnded(self._num_calls))
            self._num_calls += 1
        if self._use is CallUse.ECHO:
            self._state = State.CONTENT
        else:
            self._open_content(is_after_think=False)


STEPS: dict[State, Callable[[OutputParser, str], bool]] = {
    State.REASONING: OutputParser._read_reasoning,
    State.CONTENT: OutputParser._read_content,
    State.NAME: OutputParser._read_name,
    State.CALL: OutputParser._read_call,
}


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A whole call: the tool's name and its arguments as the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """A whole answer."""

    reasoning: str
    content: str
    calls: tuple[ParsedCall, ...]


class OutputCollector:
    """Joins the events of one answer."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []

    def add(self, events: Iterable[OutputEvent]) -> None:
        """Add events in the order in which the parser gave them."""
        for event in events:
            match event:
                case ReasoningText(text):
                    self._reasoning.append(text)
                case ContentText(text):
                    self._content.append(text)
                case ToolCallBegun(_, name):
                    self._names.append(name)
                    self._arguments.append([])
                case ToolCallArguments(index, text):
                    self._arguments[index].append(text)

    def result(self) -> ParsedOutput:
        """The answer as far as it was added."""
        arguments = ("".join(pieces) for pieces in self._arguments)
        calls = tuple(ParsedCall(name, text) for name, text in zip(self._names, arguments, strict=True))
        return ParsedOutput("".join(self._reasoning), "".join(self._content), calls)


def parse_output(
    text: str,
    start: OutputStart,
    tools: Sequence[Tool],
    discards_calls: bool = False,
    followed_by: str | None = "",
) -> ParsedOutput:
    """A whole answer read at once: by definition what the events of any division into pieces, joined, give."""
    parser = OutputParser(start, tools, discards_calls)
    collector = OutputCollector()
    collector.add(parser.push(text))
    collector.add(parser.finish(followed_by))
    return collector.result()
