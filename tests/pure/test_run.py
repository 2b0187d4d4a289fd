"""run.py from inside: what a failed preparation leaves behind, and what it says."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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


def test_the_help_names_every_command(entry: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        entry.run(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"any glint command: {', '.join(entry.COMMANDS)}" in said


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_command_is_run_as_glint_runs_it(entry: ModuleType, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []
    monkeypatch.setattr(entry, "prepare", lambda *given: steps.append(given))
    monkeypatch.setattr(entry.os, "execv", lambda *given: steps.append(given))
    entry.start_glint([command, "--max-tokens", "3"])
    python = entry.VENV_PYTHON
    assert steps == [([], "cpu"), (python, [str(python), "-P", "-m", "glint", command, "--max-tokens", "3"])]


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["check", "folder"], None),
        (["sample-model"], None),
        (["chat"], "cpu"),
        (["chat", "--url", "http://127.0.0.1:8000", "--model", "a served name"], None),
        (["generate", "hello"], "cpu"),
        (["batch", "in.jsonl", "out.jsonl"], "cpu"),
        (["bench", "cpu"], "cpu"),
        (["bench", "rank"], "cuda"),
        (["bench", "kernels"], None),
        (["smoke", "--device", "cuda"], "cuda"),
        (["smoke", "--engine", __file__], None),
    ],
)
def test_only_what_computes_needs_the_build_of_its_device(
    entry: ModuleType, arguments: list[str], needed: str | None
) -> None:
    assert entry.needed_build(arguments) == needed


def test_ranks_reach_the_command(entry: ModuleType) -> None:
    chosen, rest = entry.parse(["--smoke", "--tp", "3", "--expert-layout", "ep", "--model", "folder"])
    assert rest == []
    flags = entry.glint_flags(chosen)
    assert flags[2:] == ["--model", "folder", "--tp", "3", "--expert-layout", "ep"]
    with pytest.raises(SystemExit):
        entry.parse(["--prepare", "--tp", "3"])


@pytest.mark.parametrize(
    ("asked", "gpu", "nvcc", "device"),
    [
        (None, False, True, "cpu"),
        (None, True, False, "cpu"),
        (None, True, True, "cuda"),
        ("cuda", False, False, "cuda"),
        ("cpu", True, True, "cpu"),
    ],
)
def test_cuda_is_prepared_where_it_is_asked_for_or_can_run(
    entry: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    asked: str | None,
    gpu: bool,
    nvcc: bool,
    device: str,
) -> None:
    monkeypatch.setattr(entry, "has_gpu", lambda: gpu)
    monkeypatch.setattr(entry, "find_nvcc", lambda: nvcc)
    assert entry.prepared_device(asked) == device
    assert ("but no nvcc" in capsys.readouterr().err) == (asked is None and gpu and not nvcc)


@pytest.mark.parametrize(
    ("codes", "found", "said"),
    [
        ((0, 0), 1, None),
        ((0, 0), 0, "finds no GPU$"),
        ((100, 0), 0, "CUDA error 100"),
        ((0, 3), 0, "CUDA error 3"),
    ],
)
def test_the_driver_says_whether_cuda_can_compute(
    entry: ModuleType, monkeypatch: pytest.MonkeyPatch, codes: tuple[int, int], found: int, said: str | None
) -> None:
    def count_gpus(count: Any) -> int:
        count._obj.value = found
        return codes[1]

    driver = SimpleNamespace(cuInit=lambda flags: codes[0] if flags == 0 else 1, cuDeviceGetCount=count_gpus)
    monkeypatch.setattr(entry.ctypes, "CDLL", {"libcuda.so.1": driver}.__getitem__)
    problem = entry.cuda_problem()
    assert problem is None if said is None else re.search(said, problem)


@pytest.mark.parametrize("arguments", [["smoke", "--device", "cuda"], ["bench", "rank"]])
def test_no_cuda_engine_is_built_for_a_run_without_a_gpu(
    entry: ModuleType, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(entry, "CUDA_DRIVER", "libcuda.so.none")
    monkeypatch.setattr(entry, "prepare", lambda *_: pytest.fail("it was prepared"))
    with pytest.raises(entry.PrepareError, match=r"(?s)libcuda\.so\.none.*--prepare --device cuda"):
        entry.start_glint(arguments)
    assert not entry.has_gpu()


def test_a_missing_nvcc_names_the_package() -> None:
    command = ["bash", str(ROOT / "scripts" / "build.sh"), "--cuda", "--check"]
    environment = {**os.environ, "CUDACXX": "no-such-nvcc"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "no nvcc found (CUDACXX=no-such-nvcc)" in ended.stderr and "cuda-toolkit-13-0" in ended.stderr


def test_each_device_has_its_own_sources(entry: ModuleType) -> None:
    def touch(name: str) -> None:
        path = entry.ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("changed")

    def digests() -> list[str]:
        return [entry.sources_digest(device) for device in ("cpu", "cuda")]

    touch("CMakeLists.txt")
    for name, changes in (
        ("native/cpu/a.cpp", [True, True]),
        ("native/cuda/a.cu", [False, True]),
        ("native/cuda/a.cuh", [False, True]),
        ("cmake/cuda.cmake", [False, True]),
        ("native/README.md", [False, False]),
    ):
        before = digests()
        touch(name)
        assert [old != new for old, new in zip(before, digests(), strict=True)] == changes, name


def test_a_failed_installation_keeps_what_was_there(entry: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(entry.PrepareError, match=r"(?s)downloading requirements failed.*PIP_INDEX_URL.*PIP_FIND_LINKS"):
        entry.prepare_environment(["numpy", "glint-has-no-such-requirement"], {})
    assert entry.stamped_requirements() == ["numpy"]


def test_a_finished_installation_adds_to_what_was_there(entry: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Sequence[object]] = []
    monkeypatch.setattr(entry, "call", lambda command, *_, **__: commands.append(command))
    seconds: dict[str, float] = {}
    entry.prepare_environment(["numpy", "rich"], seconds)
    entry.prepare_environment(["rich"], seconds)
    download, _ = commands
    assert download[-1] == "rich" and "numpy" not in download
    assert entry.stamped_requirements() == ["numpy", "rich"]
    assert set(seconds) == {"downloads", "installation"}


def test_versions_are_those_that_were_recorded_for_this_python(entry: ModuleType) -> None:
    assert entry.lock_flags() == []
    lock = entry.ROOT / f"requirements-{sys.version_info[0]}.{sys.version_info[1]}.lock"
    lock.write_text("numpy==2.0.0\n")
    assert entry.lock_flags() == ["--constraint", str(lock)]


def test_a_build_for_tests_needs_the_test_library(entry: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    library, test_library, stamp = (entry.ROOT / name for name in ("library", "test_library", "stamp"))
    (entry.ROOT / "CMakeLists.txt").write_text("changed")
    monkeypatch.setattr(entry, "LIBRARIES", {"cpu": library})
    monkeypatch.setattr(entry, "TEST_LIBRARIES", {"cpu": test_library})
    monkeypatch.setattr(entry, "BUILD_STAMPS", {"cpu": stamp})
    library.touch()
    stamp.write_text(entry.sources_digest("cpu"))
    assert (entry.build_is_current("cpu"), entry.build_is_current("cpu", for_tests=True)) == (True, False)
    test_library.touch()
    assert entry.build_is_current("cpu", for_tests=True)
    (entry.ROOT / "CMakeLists.txt").write_text("changed again")
    assert not entry.build_is_current("cpu") and not entry.build_is_current("cpu", for_tests=True)


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


def test_a_gpu_brings_nccl(entry: ModuleType) -> None:
    assert entry.device_extras(["test"], "cpu") == ["test"]
    assert entry.device_extras(["test"], "cuda") == ["test", "cuda"]
    assert entry.device_extras(["cuda"], "cuda") == ["cuda"]
