"""The commands that compute or build: smoke, generate, chat, the build script and the wheel."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.e2e.commands import ROOT, call, glint, run_py

PROMPT = "The capital of France is"
SMOKE_PROMPTS = 5
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
SMALLEST_PROJECT = "cmake_minimum_required(VERSION 3.20)\nproject(smallest LANGUAGES CXX)\n"


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
