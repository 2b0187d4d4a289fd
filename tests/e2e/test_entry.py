"""The entry points as a user meets them: what run.py and glint refuse, and what they need to be prepared."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.e2e.commands import ROOT, call, glint, run_py

PROMPT = "The capital of France is"


@pytest.fixture
def entry() -> ModuleType:
    """run.py as a module, freshly loaded."""
    spec = importlib.util.spec_from_file_location("glint_run", ROOT / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--smoke is the place to begin"),
        (["--smok"], "did you mean --smoke?"),
        (["--smoke", "--bench"], "not allowed with"),
        (["--serve", "--portt", "1"], "unrecognized arguments: --portt"),
        (["--smoke", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["genrate"], "unknown command 'genrate'; did you mean generate?"),
        (["serve", "--port", "x"], "invalid int value: 'x'"),
        (["chat", "--kernels", "best"], "invalid choice: 'best'"),
        (["--smoke", "--kernels", "best"], "invalid choice: 'best'"),
        (["--bench", "--peers", "llama.cpp"], "unrecognized arguments: --peers"),
        (["--prepare", "--threads", "2"], "takes no --threads"),
        (["--smoke", "--extra", "test"], "--extra test goes with --prepare only"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(arguments: list[str], said: str) -> None:
    ended = run_py(*arguments)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "[run.py]" not in ended.stderr


def test_help_of_a_command_prepares_nothing() -> None:
    ended = run_py("generate", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "usage: glint generate" in ended.stdout


@pytest.mark.parametrize(
    ("command", "flag", "value", "said"),
    [
        ("--smoke", "--engine", "nowhere.so", "nowhere.so is not a file"),
        ("--bench", "--model", "nowhere", "nowhere is not a folder"),
        ("--serve", "--threads", "0", "0 is not at least 1"),
        ("chat", "--model", "nowhere", "nowhere is not a folder"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_at_once(command: str, flag: str, value: str, said: str) -> None:
    ended = run_py(command, flag, value)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert said in ended.stderr and "[run.py]" not in ended.stderr


def test_a_missing_compiler_names_the_package() -> None:
    ended = call("bash", ROOT / "scripts" / "build.sh", "--check", CXX="no-such-compiler")
    assert ended.returncode == 1
    assert "build-essential" in ended.stderr and "no-such-compiler" in ended.stderr


def test_an_old_python_is_refused(entry: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    entry.check_python_version()
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    with pytest.raises(entry.PrepareError, match=r"(?s)Python 3\.10\.4 .* needs 3\.11 or newer.*python3\.11-venv"):
        entry.check_python_version()


def test_a_python_without_venv_names_the_package(entry: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    entry.check_venv_module()
    monkeypatch.setattr(entry.importlib.util, "find_spec", lambda name: None if name == "ensurepip" else object())
    with pytest.raises(entry.PrepareError, match=r"(?s)'ensurepip'.*apt install python3\.\d+-venv"):
        entry.check_venv_module()


def test_an_unknown_extra_is_refused(entry: ModuleType) -> None:
    assert set(entry.requirements([])) < set(entry.requirements(["test"]))
    with pytest.raises(entry.PrepareError, match="no extra 'tset'; it has: "):
        entry.requirements(["tset"])


def test_generate_streams_what_json_holds(sample_model: Path) -> None:
    greedy = ["--temperature", "0", "--repetition-penalty", "1", "--max-tokens", "12"]
    flags = ["generate", PROMPT, "--model", sample_model, *greedy]
    streamed = glint(*flags)
    assert streamed.returncode == 0, streamed.stderr
    whole = glint(*flags, "--json", "--logprobs", "2")
    assert whole.returncode == 0, whole.stderr
    completion = json.loads(whole.stdout)
    (choice,) = completion["choices"]
    assert streamed.stdout == choice["text"] + "\n"
    assert completion["prompt"] == PROMPT
    assert len(choice["token_ids"]) == len(choice["logprobs"]) == 12
    best = [max(entry, key=entry.__getitem__) for entry in choice["logprobs"]]
    assert best == [str(token) for token in choice["token_ids"]]


def test_check_accepts_the_sample_model(sample_model: Path) -> None:
    ended = glint("check", sample_model)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "No problems." in ended.stdout
