"""Settings that every test shares: the sample model, and what runs against the sanitizer builds.

The address and undefined behaviour sanitizers run what carries the mark `sanitize`; the thread sanitizer, which is slow
and finds nothing where one thread works, what carries the mark `threads`.

Hypothesis draws the same inputs in every run; `pytest --hypothesis-profile=default` looks for new ones.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

SANITIZED_VARIABLE = "GLINT_SANITIZED"
MARKS = {"address,undefined": "sanitize", "thread": "threads"}

with suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("fixed", derandomize=True, deadline=None)
    settings.load_profile("fixed")


def pytest_configure() -> None:
    """Programs of the tests get Ctrl-C also where a shell started the tests in the background, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def sample_model() -> Path:
    """The folder of the FP8 sample model, made in the user's cache on first use."""
    from glint.sample.model import make_sample_model

    return make_sample_model()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Under a sanitizer build only files that carry its mark are imported, as the others load torch."""
    sanitizers = os.environ.get(SANITIZED_VARIABLE)
    is_test_file = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if sanitizers and is_test_file and f"pytest.mark.{MARKS[sanitizers]}" not in collection_path.read_text():
        return True
    return None
