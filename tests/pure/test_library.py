"""Finding and loading the native library: the order of places, and refusing what is not ours."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from glint.errors import EngineError
from glint.native import abi, library
from glint.native.library import NCCL_VARIABLE, choose_library, load_library, name_nccl

NAME = "libglint_cpu.so"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder without any library in it, and no library asked for by the environment."""
    monkeypatch.delenv("GLINT_ENGINE", raising=False)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "glint" / "native" / "library.py"))
    return tmp_path.resolve() / "glint"


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_the_nearest_place_wins(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = touch(package.parent / "build" / NAME)
    assert choose_library("cpu") == built
    installed = touch(package / "lib" / NAME)
    assert choose_library("cpu") == installed
    named = touch(package.parent / "named.so")
    monkeypatch.setenv("GLINT_ENGINE", str(named))
    assert choose_library("cpu") == named
    assert choose_library("cpu", built) == built


def test_the_device_names_the_file(package: Path) -> None:
    touch(package / "lib" / NAME)
    with pytest.raises(EngineError, match=r"device 'cuda'.*libglint_cuda\.so.*scripts/build\.sh --cuda.*nvcc"):
        choose_library("cuda")


def test_a_path_that_was_asked_for_must_exist(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(package / "lib" / NAME)
    with pytest.raises(EngineError, match=r"engine is .*absent\.so, which is not a file"):
        choose_library("cpu", package / "absent.so")
    monkeypatch.setenv("GLINT_ENGINE", str(package / "absent.so"))
    with pytest.raises(EngineError, match=r"\$GLINT_ENGINE is .*absent\.so"):
        choose_library("cpu")


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_text("text")
    with pytest.raises(EngineError, match="cannot be used as a glint library"):
        load_library(path)


def compile_symbols(folder: Path, names: list[str], version: int) -> Path:
    """A shared library that has the given symbols, all of them functions that return `version`."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on the path")
    source = folder / "symbols.c"
    source.write_text("".join(f"unsigned {name}(void) {{ return {version}; }}\n" for name in names))
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(folder / NAME)], check=True)
    return folder / NAME


def test_another_abi_version_is_refused(tmp_path: Path) -> None:
    path = compile_symbols(tmp_path, list(abi.FUNCTIONS), abi.ABI_VERSION + 1)
    with pytest.raises(EngineError, match=f"speaks ABI version {abi.ABI_VERSION + 1}, this package needs"):
        load_library(path)


def test_a_missing_symbol_is_refused(tmp_path: Path) -> None:
    path = compile_symbols(tmp_path, [name for name in abi.FUNCTIONS if name != "glint_check"], abi.ABI_VERSION)
    with pytest.raises(EngineError, match="glint_check"):
        load_library(path)


def test_the_wheel_of_nccl_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.delitem(sys.modules, "nvidia.nccl", raising=False)
    monkeypatch.delenv(NCCL_VARIABLE, raising=False)
    name_nccl()
    assert os.environ[NCCL_VARIABLE] == str(library)
    monkeypatch.setenv(NCCL_VARIABLE, "another")
    name_nccl()
    assert os.environ[NCCL_VARIABLE] == "another"


def test_no_wheel_of_nccl_leaves_the_choice_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.delitem(sys.modules, "nvidia.nccl", raising=False)
    monkeypatch.delenv(NCCL_VARIABLE, raising=False)
    name_nccl()
    assert NCCL_VARIABLE not in os.environ
