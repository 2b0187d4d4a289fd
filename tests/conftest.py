"""Settings that every test shares: the sample model, and what runs against the sanitizer builds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SANITIZED_VARIABLE = "GLINT_SANITIZED"
SANITIZE_MARK = "pytest.mark.sanitize"


@pytest.fixture(scope="session")
def sample_model() -> Path:
    """The folder of the FP8 sample model, made in the user's cache on first use."""
    from glint.checkpoint.sample import make_sample_model

    return make_sample_model()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Under a sanitizer build only files that carry the sanitize mark are imported, as the others load torch."""
    is_test_file = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if SANITIZED_VARIABLE in os.environ and is_test_file and SANITIZE_MARK not in collection_path.read_text():
        return True
    return None
