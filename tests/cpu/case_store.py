"""Cases of a test module by family and weights, each made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

from tests.reference.checkpoints import Family, Weights, make_checkpoint

Case = TypeVar("Case")


def quick_or_slow(cases: list[Any], quick: list[Any]) -> list[Any]:
    """The cases as parameters, those that are not among the quick ones with the mark slow."""
    assert all(case in cases for case in quick)
    return [case if case in quick else pytest.param(*as_tuple(case), marks=pytest.mark.slow) for case in cases]


def as_tuple(case: Any) -> tuple[Any, ...]:
    """The arguments of a parameter."""
    return case if isinstance(case, tuple) else (case,)


class CaseStore(Generic[Case]):
    """Makes a checkpoint, and of its folder a case, when it is first asked for."""

    def __init__(self, root: Path, make: Callable[[Path, Family, Weights], Case]) -> None:
        self._root = root
        self._make = make
        self._made: dict[tuple[Family, Weights], Case] = {}

    def __getitem__(self, key: tuple[Family, Weights]) -> Case:
        if key not in self._made:
            self._made[key] = self._make(make_checkpoint(self._root / "-".join(key), *key), *key)
        return self._made[key]
