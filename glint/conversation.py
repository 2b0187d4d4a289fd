"""A model on a terminal: answers as they come, and a typed conversation.

A model in this process and one behind a URL are two sources of the same stream of deltas.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

from glint.errors import GlintError, RequestError

if TYPE_CHECKING:
    from glint.engine.request import StepOutput
    from glint.llm import LLM
    from glint.sampling import SamplingParams

INTERRUPTED = "interrupted"
FAILED = "failed"
EXIT_CODES = {FAILED: 1, INTERRUPTED: 130}
CHAT_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops the answer that is being written"
DIM, PLAIN = "\x1b[2m", "\x1b[22m"
Message = dict[str, str]


class AnswerDelta(NamedTuple):
    """What one step adds to an answer: text, thinking, and the end with its reason."""

    text: str = ""
    reasoning: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    failure: str | None = None


class ChatModel(Protocol):
    """A model that answers conversations."""

    def answer(self, messages: Sequence[Message]) -> Iterator[AnswerDelta]:
        """The answer to a conversation as it comes; leaving the loop early stops it."""


class Answer:
    """A streamed answer: its text and tokens so far, its times, and how it ended."""

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens = 0
        self.first_seconds: float | None = None
        self.seconds = 0.0
        self.finish_reason: str = INTERRUPTED
        self.failure: str | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of a command that gave this answer."""
        return EXIT_CODES.get(self.finish_reason, 0)

    def take_in(self, delta: AnswerDelta, seconds: float) -> None:
        """Adds a delta that came `seconds` after the start."""
        self.seconds = seconds
        if self.first_seconds is None:
            self.first_seconds = seconds
        self.text += delta.text
        self.num_tokens += delta.num_tokens
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.failure = delta.failure or self.failure

    def summary(self) -> str:
        """One line with tokens, speed and the way it ended."""
        if self.first_seconds is None:
            return f"[no tokens, {self.finish_reason}]"
        decode_seconds = self.seconds - self.first_seconds
        has_speed = decode_seconds > 0 and self.num_tokens > 1
        speed = f", then {(self.num_tokens - 1) / decode_seconds:.1f} tok/s" if has_speed else ""
        return f"[{self.num_tokens} tokens, the first after {self.first_seconds:.2f} s{speed}, {self.finish_reason}]"


class AnswerView:
    """Prints deltas: thinking between <think> and </think>, dim on a terminal, then the text."""

    def __init__(self) -> None:
        is_terminal = sys.stdout.isatty()
        self._marks = (f"{DIM}<think>", f"</think>{PLAIN}\n") if is_terminal else ("<think>", "</think>\n")
        self._is_thinking = False

    def show(self, delta: AnswerDelta) -> None:
        """Prints one delta."""
        if delta.reasoning and not self._is_thinking:
            self._is_thinking = True
            print(self._marks[0], end="")
        print(delta.reasoning, end="", flush=True)
        if delta.text:
            self._end_thinking()
            print(delta.text, end="", flush=True)

    def close(self) -> None:
        """Ends the last line."""
        self._end_thinking()
        print(flush=True)

    def _end_thinking(self) -> None:
        if self._is_thinking:
            self._is_thinking = False
            print(self._marks[1], end="")


def stream_answer(deltas: Iterable[AnswerDelta]) -> Answer:
    """Prints an answer as it comes, then a line about it on standard error. Ctrl-C ends the answer, not the program."""
    answer = Answer()
    view = AnswerView()
    started = time.monotonic()
    try:
        for delta in deltas:
            answer.take_in(delta, time.monotonic() - started)
            view.show(delta)
    except KeyboardInterrupt:
        answer.finish_reason = INTERRUPTED
    view.close()
    print(answer.summary(), file=sys.stderr)
    if answer.failure is not None:
        print(f"glint: the answer failed: {answer.failure}", file=sys.stderr)
    return answer


def plain_delta(output: StepOutput) -> AnswerDelta:
    """What one step of the engine brought, with all its text as it is."""
    return AnswerDelta(output.text or "", "", len(output.token_ids), output.finish_reason, output.failure)


class LocalModel:
    """A model in this process."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params

    def answer(self, messages: Sequence[Message]) -> Iterator[AnswerDelta]:
        """The answer to a conversation; the model's thinking is apart from its text."""
        from glint.text.chat import render_prompt
        from glint.text.output import ContentText, OutputParser, ReasoningText, find_start
        from glint.text.tags import Tag

        tokenizer = self._llm.need_tokenizer()
        prompt = render_prompt(tokenizer, list(messages))
        parser = OutputParser(find_start(prompt.marked, tokenizer.token_to_id(Tag.THINK) is not None), ())
        for output in self._llm.stream(tokenizer.encode_prompt(prompt), self._params):
            events = parser.push(output.text or "")
            if output.finish_reason is not None:
                events += parser.finish(None if output.finish_reason == "length" else str(output.stop_reason or ""))
            text = "".join(event.text for event in events if isinstance(event, ContentText))
            reasoning = "".join(event.text for event in events if isinstance(event, ReasoningText))
            yield plain_delta(output)._replace(text=text, reasoning=reasoning)


class Conversation:
    """The messages of a chat, and the model that answers them."""

    def __init__(self, model: ChatModel, system: str | None) -> None:
        self._model = model
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self._opening)

    def say(self, text: str) -> None:
        """Prints the answer to a message and remembers both; a message that is refused is forgotten."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = stream_answer(self._model.answer(asked))
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]


def read_message() -> str | None:
    """The next message of standard input, after a "> " where it is typed; None at the end.

    A message is a line, or on a terminal with GNU readline also a pasted block of lines.
    """
    is_typed = sys.stdin.isatty()
    try:
        return input("> " if is_typed else "").strip()
    except EOFError:
        if is_typed:
            print()
        return None
    except UnicodeDecodeError as problem:
        raise RequestError(f"a message cannot be read from standard input: {problem}; give UTF-8 text") from problem


def edit_lines() -> None:
    """Lets a typed line be edited, and a pasted block be one message, where Python has readline."""
    with suppress(ImportError):
        importlib.import_module("readline").parse_and_bind("set enable-bracketed-paste on")


def talk(conversation: Conversation) -> int:
    """Reads messages and commands from standard input until it ends; gives the exit code."""
    if sys.stdin.isatty():
        edit_lines()
    print(CHAT_HELP, file=sys.stderr)
    while True:
        message = read_message()
        if message is None or message == "/exit":
            return 0
        if message == "/reset":
            conversation.reset()
            print("the conversation is forgotten", file=sys.stderr)
        elif message.startswith("/") and "\n" not in message:
            print(f"unknown command {message.split()[0]}: {CHAT_HELP}", file=sys.stderr)
        elif message:
            try:
                conversation.say(message)
            except GlintError as problem:
                print(f"glint: {problem}; /reset begins anew", file=sys.stderr)
