"""Which cases of a sweep only `scripts/test.sh --all` runs."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Cases of a parameter, or of several as tuples, with the mark of those that say little more than the others."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
