"""A typed conversation: the prompt sign on a terminal alone, the end, and bytes that are no text."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glint.conversation import read_line
from glint.errors import RequestError

ROOT = Path(__file__).resolve().parents[2]
TALK = """import sys
from glint.conversation import Conversation, talk
if len(sys.argv) > 1:
    sys.modules["readline"] = None
sys.exit(talk(Conversation(None, None, None)))
"""


def piped(data: bytes) -> io.TextIOWrapper:
    """Standard input as a pipe with these bytes."""
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")


def test_piped_lines_have_no_prompt_sign(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", piped(b"hello \n/exit"))
    assert [read_line(), read_line(), read_line()] == ["hello", "/exit", None]
    assert capsys.readouterr().out == ""


def test_bytes_that_are_no_text_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", piped(b"\xff\xfe\n"))
    with pytest.raises(RequestError, match=r"standard input.*give UTF-8 text"):
        read_line()


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
