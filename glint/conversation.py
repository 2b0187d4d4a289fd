"""A model on a terminal: answers as they come, and a typed conversation."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from glint.errors import GlintError, RequestError

if TYPE_CHECKING:
    from glint.engine.request import StepOutput
    from glint.llm import LLM
    from glint.sampling import SamplingParams

INTERRUPTED = "interrupted"
EXIT_CODES = {"stop": 0, "length": 0, "failed": 1, INTERRUPTED: 130}
CHAT_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops the answer that is being written"


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
        return EXIT_CODES[self.finish_reason]

    def take_in(self, output: StepOutput, seconds: float) -> None:
        """Adds what one step brought, `seconds` after the start."""
        self.seconds = seconds
        if self.first_seconds is None:
            self.first_seconds = seconds
        self.text += output.text or ""
        self.num_tokens += len(output.token_ids)
        self.finish_reason = output.finish_reason or self.finish_reason
        self.failure = output.failure

    def summary(self) -> str:
        """One line with tokens, speed and the way it ended."""
        if self.first_seconds is None:
            return f"[no tokens, {self.finish_reason}]"
        decode_seconds = self.seconds - self.first_seconds
        speed = f", then {(self.num_tokens - 1) / decode_seconds:.1f} tok/s" if decode_seconds > 0 else ""
        return f"[{self.num_tokens} tokens, the first after {self.first_seconds:.2f} s{speed}, {self.finish_reason}]"


def stream_answer(outputs: Iterable[StepOutput]) -> Answer:
    """Prints an answer as it comes, then a line about it on standard error. Ctrl-C ends the answer, not the program."""
    answer = Answer()
    started = time.monotonic()
    try:
        for output in outputs:
            answer.take_in(output, time.monotonic() - started)
            print(output.text or "", end="", flush=True)
    except KeyboardInterrupt:
        answer.finish_reason = INTERRUPTED
    print(flush=True)
    print(answer.summary(), file=sys.stderr)
    if answer.failure is not None:
        print(f"glint: the answer failed: {answer.failure}", file=sys.stderr)
    return answer


class Conversation:
    """The messages of a chat, and the model that answers them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self._opening)

    def say(self, text: str) -> None:
        """Prints the answer to a message and remembers both; a message that is refused is forgotten."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = stream_answer(self._llm.stream_chat(asked, self._params))
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]


def read_line() -> str | None:
    """The next line of standard input, after a "> " where it is typed; None at the end."""
    is_typed = sys.stdin.isatty()
    try:
        return input("> " if is_typed else "").strip()
    except EOFError:
        if is_typed:
            print()
        return None
    except UnicodeDecodeError as problem:
        raise RequestError(f"a message cannot be read from standard input: {problem}; give UTF-8 text") from problem


def talk(conversation: Conversation) -> int:
    """Reads messages and commands from standard input until it ends; gives the exit code."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            importlib.import_module("readline")
    print(CHAT_HELP, file=sys.stderr)
    while True:
        line = read_line()
        if line is None or line == "/exit":
            return 0
        if line == "/reset":
            conversation.reset()
            print("the conversation is forgotten", file=sys.stderr)
        elif line.startswith("/"):
            print(f"unknown command {line.split()[0]}: {CHAT_HELP}", file=sys.stderr)
        elif line:
            try:
                conversation.say(line)
            except GlintError as problem:
                print(f"glint: {problem}; /reset begins anew", file=sys.stderr)
