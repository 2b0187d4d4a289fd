"""Makes deliberate changes to a copy of the checkout, one at a time, and names those that no test notices.

Run it by scripts/mutate.sh. The checkout itself is never changed. The tests of a change first run on the unchanged
copy, so that their failure afterwards is due to the change.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutations.changes import Change, ListError, read_changes

ROOT = Path(__file__).resolve().parents[2]
TESTS_FAILED = 1
MIN_LIMIT_SECONDS = 120.0
LIMIT_FACTOR = 10.0


class Ended(NamedTuple):
    """How a command ended: its exit status, None where it ran over its limit, what it printed and its seconds."""

    status: int | None
    output: str
    seconds: float


def run_command(command: Sequence[str], folder: Path, environment: dict[str, str], limit: float) -> Ended:
    """Run a command in a process group of its own, which is killed once it runs over the limit."""
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return Ended(status, output.read(), time.monotonic() - start)


class Copy:
    """A copy of the tracked files with a build folder of its own; `.venv` is the checkout's."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = folder
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        (folder / ".venv").symlink_to(root / ".venv")
        programs = f"{root / '.venv' / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        self._environment = os.environ | {
            "PATH": programs,
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CCACHE_BASEDIR": str(folder),
            "CCACHE_NOHASHDIR": "1",
            "CCACHE_SLOPPINESS": "pch_defines,time_macros",
        }
        for name in ("GLINT_ENGINE", "GLINT_TEST_LIBRARY"):
            self._environment.pop(name, None)
        if shutil.which("ccache"):
            self._environment.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", "ccache")

    def write(self, change: Change) -> str:
        """Make a change; give the text of the file as it was."""
        path = self._folder / change.file
        before = path.read_text(encoding="utf-8")
        path.write_text(change.apply(before), encoding="utf-8")
        return before

    def restore(self, change: Change, before: str) -> None:
        """Write the file as it was."""
        (self._folder / change.file).write_text(before, encoding="utf-8")

    def build(self) -> Ended:
        """Build both CPU libraries, of which only what changed is compiled."""
        return run_command(["bash", "scripts/build.sh", "--tests"], self._folder, self._environment, 3600.0)

    def test(self, tests: Sequence[str], limit: float) -> Ended:
        """Run what scripts/test.sh runs of these tests by default, up to the first failure."""
        flags = ["-x", "-q", "--color=no", "-m", "not slow", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *flags, *tests]
        return run_command(command, self._folder, self._environment, limit)


class Judge:
    """Runs changes on a copy and keeps count of how they ended."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._baselines: dict[tuple[str, ...], Ended] = {}
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def baseline(self, tests: tuple[str, ...]) -> Ended:
        """Run the tests on the unchanged copy, once for each selection."""
        if tests not in self._baselines:
            self._baselines[tests] = self._copy.test(tests, 1800.0)
        return self._baselines[tests]

    def judge(self, change: Change) -> tuple[str, float]:
        """Make the change, run its tests and undo it; give the verdict and the seconds that the tests took."""
        before = self._copy.write(change)
        try:
            if change.is_native:
                built = self._copy.build()
                if built.status != 0:
                    self.problems.append(f"{change.name}: it does not build:\n{built.output[-2000:]}")
                    return "broken", built.seconds
            limit = max(MIN_LIMIT_SECONDS, LIMIT_FACTOR * self._baselines[change.tests].seconds)
            ended = self._copy.test(change.tests, limit)
        finally:
            self._copy.restore(change, before)
        if ended.status == 0:
            return self._survived(change), ended.seconds
        is_killed = ended.status is None or ended.status < 0 or ended.status == TESTS_FAILED
        if not is_killed:
            self.problems.append(f"{change.name}: pytest ended with {ended.status}:\n{ended.output[-2000:]}")
        return "killed" if is_killed else "broken", ended.seconds

    def _survived(self, change: Change) -> str:
        if change.lives is not None:
            return "lives"
        self.problems.append(f"{change.name}: no test noticed {change.old.strip()!r} -> {change.new.strip()!r}")
        return "SURVIVED"

    def run(self, changes: Sequence[Change]) -> None:
        """Judge the changes in turn, those of Python first, and print a line for each."""
        for tests in dict.fromkeys(change.tests for change in changes):
            ended = self.baseline(tests)
            print(f"unchanged {ended.seconds:6.1f} s  {' '.join(tests)}", flush=True)
            if ended.status != 0:
                raise ListError(f"these tests fail without a change: {' '.join(tests)}\n{ended.output[-4000:]}")
        for index, change in enumerate(changes, 1):
            verdict, seconds = self.judge(change)
            self.counts[verdict] += 1
            reason = f": {change.lives}" if verdict == "lives" else ""
            print(f"{index:3}/{len(changes)} {verdict:8} {seconds:6.1f} s  {change.name}{reason}", flush=True)


def choose(changes: Sequence[Change], arguments: argparse.Namespace) -> list[Change]:
    """The changes that the flags ask for, those of Python first."""
    unknown = set(arguments.only or ()) - {change.name for change in changes}
    if unknown:
        raise ListError(f"no change has the name {', '.join(sorted(unknown))}; see --list")
    chosen = [change for change in changes if arguments.only is None or change.name in arguments.only]
    if arguments.python or arguments.native:
        chosen = [change for change in chosen if (arguments.native if change.is_native else arguments.python)]
    return sorted(chosen, key=lambda change: change.is_native)


def run_changes(changes: Sequence[Change]) -> int:
    """Run the changes on a copy in a temporary folder; give the exit status."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="glint-mutate-") as folder:
        copy = Copy(ROOT, Path(folder).resolve())
        if any(change.needs_libraries for change in changes):
            built = copy.build()
            print(f"built     {built.seconds:6.1f} s", flush=True)
            if built.status != 0:
                raise ListError(f"the unchanged libraries do not build:\n{built.output[-4000:]}")
        judge = Judge(copy)
        judge.run(changes)
    for problem in judge.problems:
        print(f"\n{problem}")
    counts = judge.counts
    minutes = (time.monotonic() - start) / 60
    print(
        f"\n{len(changes)} changes: {counts['killed']} killed, {counts['lives']} live with a reason, "
        f"{counts['SURVIVED']} survived, {counts['broken']} broken; {minutes:.1f} minutes"
    )
    return 1 if judge.problems else 0


def main() -> int:
    """Run from the command line; 0 where every change was noticed or has a reason to live."""
    parser = argparse.ArgumentParser(prog="scripts/mutate.sh", description="name the changes that no test notices")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these changes")
    parser.add_argument("--python", action="store_true", help="only changes of Python files")
    parser.add_argument("--native", action="store_true", help="only changes of C++ files")
    parser.add_argument("--list", action="store_true", help="print the changes and run nothing")
    arguments = parser.parse_args()
    try:
        changes = choose(read_changes(ROOT), arguments)
        if arguments.list:
            for change in changes:
                print(f"{change.name}: {change.file}: {change.old.strip()} -> {change.new.strip()}")
            return 0
        return run_changes(changes)
    except ListError as error:
        print(f"mutate.sh: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
