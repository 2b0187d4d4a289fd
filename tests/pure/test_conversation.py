"""A typed conversation: the prompt sign, pasted blocks, thinking, the end, and bytes that are no text."""

from __future__ import annotations

import io
import os
import readline
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from glint.conversation import AnswerDelta, LocalModel, read_message, stream_answer
from glint.engine.request import StepOutput
from glint.errors import RequestError
from glint.text.tokenizer import Tokenizer
from tests.pure.openai_endpoint import Script, serving
from tests.pure.text_folder import GLM_TEMPLATE, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SILENT_SECONDS = 60.0
TALK = """import sys
from glint.conversation import Conversation, talk
if len(sys.argv) > 1:
    sys.modules["readline"] = None
sys.exit(talk(Conversation(None, None)))
"""
ECHO = """import sys
from glint.conversation import AnswerDelta, Conversation, talk
class Echo:
    def answer(self, messages):
        yield AnswerDelta(repr(messages[-1]["content"]), "", 1, "stop")
sys.exit(talk(Conversation(Echo(), None)))
"""


def piped(data: bytes) -> io.TextIOWrapper:
    """Standard input as a pipe with these bytes."""
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")


def test_piped_lines_have_no_prompt_sign(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", piped(b"hello \n/exit"))
    assert [read_message(), read_message(), read_message()] == ["hello", "/exit", None]
    assert capsys.readouterr().out == ""


def test_bytes_that_are_no_text_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", piped(b"\xff\xfe\n"))
    with pytest.raises(RequestError, match=r"standard input.*give UTF-8 text"):
        read_message()


@pytest.mark.parametrize("flags", [[], ["without readline"]])
def test_typed_lines_have_a_prompt_sign(flags: list[str]) -> None:
    controller, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TALK, *flags],
        cwd=ROOT,
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.write(controller, b"/reset\n/exit\n")
    shown, error = process.communicate(timeout=60)
    os.close(controller)
    os.close(terminal)
    assert process.returncode == 0, error
    assert "forgotten" in error and "Traceback" not in error
    assert (shown + error).count("> ") == 2


def on_a_terminal(program: str, *turns: tuple[str, bytes]) -> tuple[int, str]:
    """Runs a program on a terminal of its own and gives the exit code and what was shown.

    Each turn is what must be shown, since the turn before, until it types. A program that shows nothing for a minute is
    killed.
    """
    pid, controller = os.forkpty()
    if pid == 0:
        os.chdir(ROOT)
        os.execve(sys.executable, [sys.executable, "-c", program], os.environ | {"TERM": "xterm"})
    waiting = list(turns)
    shown, seen = b"", 0
    try:
        while piece := os.read(controller, 4096) if select.select([controller], [], [], SILENT_SECONDS)[0] else b"":
            shown += piece
            while waiting and (found := shown.find(waiting[0][0].encode(), seen)) >= 0:
                awaited, typed = waiting.pop(0)
                seen = found + len(awaited)
                os.write(controller, typed)
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
    os.close(controller)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


@pytest.mark.skipif("libedit" in (readline.__doc__ or ""), reason="libedit has no bracketed paste")
@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        (b"\x1b[200~one\rtwo\n\nthree\x1b[201~\r", [r"'one\ntwo\n\nthree'"]),
        (b"look: \x1b[200~a\rb\x1b[201~ done\rnext\r", [r"'look: a\nb done'", "'next'"]),
        (b"\x1b[200~/bin\r/usr\x1b[201~\r", [r"'/bin\n/usr'"]),
    ],
)
def test_a_pasted_block_is_one_message(typed: bytes, messages: list[str]) -> None:
    code, shown = on_a_terminal(ECHO, ("> ", typed + b"/exit\r"))
    assert code == 0, shown
    assert "\x1b[?2004h" in shown, "the terminal was not asked to mark what is pasted"
    assert shown.count("[1 tokens") == len(messages)
    assert all(message in shown for message in messages)


class Steps:
    """The engine's side of a chat: a tokenizer, and the steps of an answer."""

    def __init__(self, folder: Path, *texts: str) -> None:
        self._tokenizer = Tokenizer(write_tokenizer(folder, GLM_TEMPLATE))
        self._texts = texts

    def need_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def stream(self, prompt: list[int], params: object) -> Iterator[StepOutput]:
        for index, text in enumerate(self._texts, start=1):
            reason = "stop" if index == len(self._texts) else None
            yield StepOutput(0, text, (index,), None, None, 0, reason, None)


def test_thinking_of_a_local_model_is_apart_from_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = LocalModel(Steps(tmp_path, "let me ", "see</thi", "nk>\nfor", "ty-two"), None)
    deltas = list(model.answer([{"role": "user", "content": "hello"}]))
    assert "".join(delta.reasoning for delta in deltas) == "let me see"
    assert "".join(delta.text for delta in deltas) == "forty-two"
    assert (sum(delta.num_tokens for delta in deltas), deltas[-1].finish_reason) == (4, "stop")
    assert stream_answer(deltas).text == "forty-two"
    assert capsys.readouterr().out == "<think>let me see</think>\nforty-two\n"


def test_thinking_that_never_ends_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    assert stream_answer([AnswerDelta("", "hm", 1, "length")]).text == ""
    assert capsys.readouterr().out == "<think>hm</think>\n\n"


def test_ctrl_c_stops_the_answer_of_a_server_and_not_the_chat() -> None:
    with serving(Script(gap=0.1)) as server:
        command = ["chat", "--url", server.url, "--model", "scripted", "--max-tokens", "600"]
        program = f"import sys; from glint import cli; sys.exit(cli.main({command!r}))"
        turns = [("> ", b"one\r"), ("word", b"\x03"), ("interrupted]", b""), ("> ", b"two\r"), ("word", b"\x03")]
        code, shown = on_a_terminal(program, *turns, ("interrupted]", b""), ("> ", b"/exit\r"))
    assert code == 0 and shown.count("interrupted]") == 2 and "Traceback" not in shown, shown
    first, second = (seen.body["messages"] for seen in server.seen)
    assert [message["content"] for message in first] == ["one"]
    assert (
        second[1]["role"] == "assistant" and second[1]["content"].startswith(" word") and second[2]["content"] == "two"
    )
