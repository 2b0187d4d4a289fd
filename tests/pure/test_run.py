"""run.py from inside: what a failed preparation leaves behind, and what it says."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from glint import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """run.py as a module, for a checkout of its own whose .venv holds 'numpy' and runs this Python."""
    spec = importlib.util.spec_from_file_location("glint_run", ROOT / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", venv)
    monkeypatch.setattr(module, "VENV_PYTHON", venv / "bin" / "python")
    monkeypatch.setattr(module, "VENV_STAMP", venv / "stamp.json")
    stamp = {"identity": module.venv_identity(), "requirements": ["numpy"]}
    module.VENV_STAMP.write_text(json.dumps(stamp))
    return module


def test_the_commands_are_those_of_glint(entry: ModuleType) -> None:
    actions = cli.make_parser()._actions
    (commands,) = (action.choices for action in actions if isinstance(action, argparse._SubParsersAction))
    assert set(entry.COMMANDS) == set(commands)


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["check", "folder"], False),
        (["sample-model"], False),
        (["chat"], True),
        (["bench", "cpu"], True),
        (["smoke", "--engine", __file__], False),
    ],
)
def test_only_what_computes_needs_the_build(entry: ModuleType, arguments: list[str], needed: bool) -> None:
    assert entry.needs_build(arguments) == needed


def test_a_failed_installation_keeps_what_was_there(entry: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(entry.PrepareError, match=r"(?s)installing requirements failed.*PIP_INDEX_URL.*PIP_FIND_LINKS"):
        entry.prepare_environment(["numpy", "glint-has-no-such-requirement"])
    assert entry.stamped_requirements() == ["numpy"]


def test_a_finished_installation_adds_to_what_was_there(entry: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Sequence[object]] = []
    monkeypatch.setattr(entry, "call", lambda command, *_, **__: commands.append(command))
    entry.prepare_environment(["numpy", "rich"])
    entry.prepare_environment(["rich"])
    (command,) = commands
    assert command[-1] == "rich" and "numpy" not in command
    assert entry.stamped_requirements() == ["numpy", "rich"]


@pytest.mark.parametrize("damaged", ['{"identity": {', "{}", "[]", "7", '{"identity": null}'])
def test_a_damaged_stamp_counts_as_none(entry: ModuleType, damaged: str) -> None:
    assert entry.stamped_requirements() == ["numpy"]
    entry.VENV_STAMP.write_text(damaged)
    assert entry.stamped_requirements() == []


def test_a_command_that_cannot_be_started_is_named(entry: ModuleType) -> None:
    with pytest.raises(
        entry.PrepareError, match="greeting needs 'no-such-shell', which cannot be started: No such file"
    ):
        entry.call(["no-such-shell", "-c", "true"], "greeting")


def test_a_checkout_that_cannot_be_written_is_one_line(
    entry: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (entry.ROOT / ".prepare.lock").mkdir()
    monkeypatch.setattr(sys, "argv", ["run.py", "--prepare"])
    assert entry.main() == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and ".prepare.lock" in said and "must be writable" in said
