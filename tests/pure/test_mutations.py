"""The list of deliberate changes is read strictly, and a change is judged by how its tests ended."""

from pathlib import Path

import pytest

from tests.mutations.changes import Change, ListError, parse_changes, read_changes
from tests.mutations.run import Copy, Ended, Judge

ROOT = Path(__file__).resolve().parents[2]
ENTRY = """
[[change]]
name = "a"
file = "m.py"
old = 'x < 1'
new = 'x <= 1'
tests = ["tests/pure/test_m.py::test_x"]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tests/pure").mkdir(parents=True)
    (tmp_path / "m.py").write_text("if x < 1:\n    pass\n")
    (tmp_path / "tests/pure/test_m.py").write_text("def test_x() -> None:\n    pass\n")
    return tmp_path


def test_every_listed_change_fits_the_checkout() -> None:
    assert len(read_changes(ROOT)) > 200


def test_a_change_is_read_and_made_once(root: Path) -> None:
    (change,) = parse_changes(ENTRY, "list")
    change.check(root)
    assert change.apply("if x < 1:\n") == "if x <= 1:\n"
    assert (change.is_native, change.needs_libraries, change.lives) == (False, False, None)
    for text in ("if x > 1:\n", "x < 1 or x < 1"):
        with pytest.raises(ListError, match=r"times in m\.py, not once"):
            change.apply(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "a"', "", "lacks .'name'."),
        ('name = "a"', "name = 1", "unusable fields .'name'."),
        ('name = "a"', 'name = "a"\nreason = "b"', "unusable fields .'reason'."),
        ("x <= 1", "x < 1", "two different lines"),
        ('["tests/pure/test_m.py::test_x"]', "[]", "no tests are named"),
        ("test_m.py", "test_n.py", "test_n.py is not a file"),
        ("::test_x", "::test_y", "has no test_y"),
        ('"m.py"', '"n.py"', "n.py is not a file"),
        ("x < 1", "y < 1", "occurs 0 times"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(root: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ListError, match=message):
        for change in parse_changes(ENTRY.replace(old, new, 1), "list"):
            change.check(root)


class FixedCopy(Copy):
    """A copy whose tests end with given statuses, and which remembers what was written."""

    def __init__(self, statuses: list[int | None]) -> None:
        self.statuses = statuses
        self.text = "unchanged"

    def write(self, change: Change) -> str:
        before, self.text = self.text, change.new
        return before

    def restore(self, change: Change, before: str) -> None:
        self.text = before

    def build(self) -> Ended:
        return Ended(self.statuses.pop(0), "", 1.0)

    def test(self, tests: object, limit: float) -> Ended:
        return Ended(self.statuses.pop(0), "", 1.0)


@pytest.mark.parametrize(
    ("statuses", "lives", "is_native", "verdict", "num_problems"),
    [
        ([0, 1], None, False, "killed", 0),
        ([0, -11], None, False, "killed", 0),
        ([0, None], None, False, "killed", 0),
        ([0, 0], None, False, "SURVIVED", 1),
        ([0, 0], "equal", False, "lives", 0),
        ([0, 2], None, False, "broken", 1),
        ([0, 5], None, False, "broken", 1),
        ([0, 1], None, True, "broken", 1),
        ([0, 0, 1], None, True, "killed", 0),
        ([0, 0, 0], None, True, "SURVIVED", 1),
    ],
)
def test_a_change_is_judged_by_how_its_tests_ended(
    statuses: list[int | None], lives: str | None, is_native: bool, verdict: str, num_problems: int
) -> None:
    copy = FixedCopy(statuses)
    judge = Judge(copy)
    judge.run([Change("a", "native/m.cpp" if is_native else "m.py", "x", "y", ("t.py",), lives)])
    assert (dict(judge.counts), len(judge.problems)) == ({verdict: 1}, num_problems)
    assert (copy.statuses, copy.text) == ([], "unchanged")


def test_tests_that_fail_without_a_change_say_nothing() -> None:
    with pytest.raises(ListError, match="fail without a change"):
        Judge(FixedCopy([1])).run([Change("a", "m.py", "x", "y", ("t.py",))])
