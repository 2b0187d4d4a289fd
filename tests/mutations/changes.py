"""The list of deliberate changes: one line each, with the tests that must notice it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LISTS = tuple(sorted(path.name for path in FOLDER.glob("*.toml")))
FIELDS = {"name": str, "file": str, "old": str, "new": str, "tests": list, "lives": str}


class ListError(Exception):
    """The list of changes does not fit the checkout, or cannot be read."""


@dataclass(frozen=True)
class Change:
    """One change: `old`, which stands in `file` exactly once, becomes `new`, and one of `tests` must fail.

    `lives` is the reason why no test can notice it, where that is so.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    lives: str | None = None

    @property
    def is_native(self) -> bool:
        """Whether the libraries must be built for it."""
        return self.file.startswith("native/")

    @property
    def needs_libraries(self) -> bool:
        """Whether its tests load the native libraries."""
        return self.is_native or any(test.startswith("tests/cpu/") for test in self.tests)

    def apply(self, text: str) -> str:
        """The text of the file with the change made."""
        found = text.count(self.old)
        if found != 1:
            raise ListError(f"{self.name}: {self.old!r} occurs {found} times in {self.file}, not once")
        return text.replace(self.old, self.new)

    def check(self, root: Path) -> None:
        """Raise ListError unless the change fits the files below root."""
        if "\n" in self.old or "\n" in self.new or self.old == self.new:
            raise ListError(f"{self.name}: old and new must be two different lines")
        if not self.tests:
            raise ListError(f"{self.name}: no tests are named")
        for path, _, function in ((self.file, "", ""), *(test.partition("::") for test in self.tests)):
            if not (root / path).is_file():
                raise ListError(f"{self.name}: {path} is not a file of the checkout")
            if function and f"def {function}(" not in (root / path).read_text(encoding="utf-8"):
                raise ListError(f"{self.name}: {path} has no {function}")
        self.apply((root / self.file).read_text(encoding="utf-8"))


def parse_changes(text: str, source: str) -> list[Change]:
    """Read one list; every entry has exactly the fields of a Change."""
    changes = []
    for index, entry in enumerate(tomllib.loads(text).get("change", [])):
        wrong = [name for name, value in entry.items() if not isinstance(value, FIELDS.get(name, ()))]
        missing = sorted(FIELDS.keys() - {"lives"} - entry.keys())
        if wrong or missing:
            raise ListError(f"{source}: change {index + 1} lacks {missing} or has unusable fields {wrong}")
        changes.append(Change(**(entry | {"tests": tuple(entry["tests"])})))
    return changes


def read_changes(root: Path) -> list[Change]:
    """Every change of the lists, checked against the files below root; names are unique."""
    changes = [change for name in LISTS for change in parse_changes((FOLDER / name).read_text(encoding="utf-8"), name)]
    names = [change.name for change in changes]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ListError(f"names occur twice: {', '.join(twice)}")
    for change in changes:
        change.check(root)
    return changes
