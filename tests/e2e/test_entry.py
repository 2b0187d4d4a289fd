"""The entry points as a user meets them: run.py, the build script, the glint command and the wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The capital of France is"
SMOKE_PROMPTS = 5
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
SMALLEST_PROJECT = "cmake_minimum_required(VERSION 3.20)\nproject(smallest LANGUAGES CXX)\n"


def call(*command: str | Path, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command from another folder than the repository's, as a user may."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def glint(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the glint command."""
    return call(sys.executable, "-m", "glint", *arguments, stdin=stdin)


def run_py(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the entry point of the checkout."""
    return call(ROOT / "run.py", *arguments, **environment)


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


def test_help_teaches() -> None:
    ended = run_py("--help")
    assert ended.returncode == 0
    assert all(flag in ended.stdout for flag in ("--smoke", "--bench", "--serve", "--model", "--engine", "--device"))


def test_help_of_a_command_prepares_nothing() -> None:
    ended = run_py("generate", "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "usage: glint generate" in ended.stdout


@pytest.mark.parametrize("command", ["--smoke", "--bench", "--serve", "chat"])
@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--engine", "nowhere.so", "nowhere.so is not a file"),
        ("--model", "nowhere", "nowhere is not a folder"),
        ("--threads", "0", "0 is not at least 1"),
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


def test_cmake_names_the_package_of_a_missing_compiler(tmp_path: Path) -> None:
    for compiler, is_there in (("no-such-compiler", False), ("", True)):
        ended = call("cmake", "-S", ROOT, "-B", tmp_path, CXX=compiler, PATH=PATH)
        assert (ended.returncode == 0) == is_there, ended.stderr
        assert ("build-essential" in ended.stderr) != is_there


def test_another_compiler_or_place_configures_anew(tmp_path: Path) -> None:
    (tmp_path / "first" / "scripts").mkdir(parents=True)
    (tmp_path / "first" / "CMakeLists.txt").write_text(SMALLEST_PROJECT)
    shutil.copy(ROOT / "scripts" / "build.sh", tmp_path / "first" / "scripts")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    (tmp_path / "other").write_text(f'#!/bin/sh\nexec "{compiler}" "$@"\n')
    (tmp_path / "other").chmod(0o755)

    def build(name: str, chosen: str) -> tuple[bool, str]:
        ended = call("bash", tmp_path / name / "scripts" / "build.sh", CXX=chosen, PATH=PATH)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        cache = (tmp_path / name / "build" / "CMakeCache.txt").read_text()
        (used,) = (line for line in cache.splitlines() if line.startswith("CMAKE_CXX_COMPILER:"))
        return "configuring it anew" in ended.stdout, used.partition("=")[2]

    other = str(tmp_path / "other")
    assert build("first", Path(compiler).name) == (False, compiler)
    assert build("first", compiler) == (False, compiler)
    assert build("first", other) == (True, other)
    (tmp_path / "first").rename(tmp_path / "second")
    assert build("second", other) == (True, other)
    assert build("second", other) == (False, other)


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
    with pytest.raises(entry.PrepareError, match="no extra 'tset'; it has: cuda, modal, ray, test"):
        entry.requirements(["tset"])


def test_a_changed_source_asks_for_a_build(entry: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "ROOT", tmp_path)
    for name in ("CMakeLists.txt", "native/a.cpp", "native/a.h", "native/README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before = entry.sources_digest("cpu")
    (tmp_path / "native/README.md").write_text("changed")
    assert entry.sources_digest("cpu") == before
    (tmp_path / "native/a.h").write_text("changed")
    assert entry.sources_digest("cpu") != before


def test_a_second_start_prepares_nothing() -> None:
    first = run_py("--prepare")
    assert first.returncode == 0, first.stderr
    second = run_py("--prepare")
    assert (second.returncode, second.stdout, second.stderr) == (0, "", "")


def test_smoke_passes_on_the_sample_model(sample_model: Path) -> None:
    ended = run_py("--smoke", "--model", str(sample_model))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("\n> ") == SMOKE_PROMPTS
    assert "tok/s" in ended.stdout and ended.stdout.endswith("smoke: all is well\n")


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


def test_generate_reads_standard_input_and_follows_the_seed(sample_model: Path) -> None:
    flags = ["generate", "--model", sample_model, "--temperature", "1", "--max-tokens", "16"]
    texts = [glint(*flags, "--seed", seed, stdin=PROMPT).stdout for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].strip()


def test_ctrl_c_ends_an_answer_with_130(sample_model: Path) -> None:
    """Also where this test's own process ignores the signal, as those that a shell put into the background do."""
    flags = ["generate", PROMPT, "--model", str(sample_model), "--max-tokens", "4000", "--ignore-eos"]
    restored = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program = restored + "from glint.cli import command; sys.exit(command())"
    with subprocess.Popen(
        [sys.executable, "-c", program, *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            rest, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, error
    assert (first + rest).endswith("\n") and "interrupted]" in error and "Traceback" not in error


def test_chat_remembers_and_takes_commands(sample_model: Path) -> None:
    lines = ["My name is Ada.", "/reset", "/sing", "Say hello.", "/exit"]
    ended = glint("chat", "--model", sample_model, "--max-tokens", "8", "--temperature", "0", stdin="\n".join(lines))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() and not any(line.startswith(">") for line in ended.stdout.splitlines())
    assert ended.stderr.count(" tokens, the first after ") == 2
    assert "forgotten" in ended.stderr and "unknown command /sing" in ended.stderr


def test_check_accepts_the_sample_model(sample_model: Path) -> None:
    ended = glint("check", sample_model)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "No problems." in ended.stdout


def test_the_wheel_holds_the_engine_and_the_command(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = call(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("glint-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert {"glint/cli.py", "glint/lib/libglint_cpu.so"} <= names
    assert not any(name.startswith("tests/") or "libglint_cpu_test" in name for name in names)
    assert "glint=glint.cli:command" in entry_points.replace(" ", "")
    target = tmp_path / "installed"
    installed = call(*pip, "install", "--no-deps", "--no-index", "--target", target, wheel)
    assert installed.returncode == 0, installed.stderr
    asked = call(sys.executable, "-m", "glint", "--version", PYTHONPATH=str(target))
    assert (asked.returncode, asked.stdout) == (0, "glint 0.1.0\n")
