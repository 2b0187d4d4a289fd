"""Cases of a test module by family and weights, each made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from tests.reference.checkpoints import Family, Weights, make_checkpoint

Case = TypeVar("Case")


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
