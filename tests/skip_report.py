"""A pytest plugin for scripts/test.sh: counts the tests that ran and says which were skipped and why.

With --no-skips a skipped test fails the run, unless the processor lacks instructions or the package is one that a
machine of the tests cannot be expected to have. With GLINT_TEST_COUNTS set, one line per run goes into that file: how
many passed and how many were skipped.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

COUNTS_VARIABLE = "GLINT_TEST_COUNTS"
EXPECTED = re.compile(r"need instructions that this processor|could not import 'llama_cpp'|llama-cpp-python is")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --no-skips."""
    parser.addoption("--no-skips", action="store_true", help="fail if a test is skipped that could have run here")


def pytest_configure(config: pytest.Config) -> None:
    """Starts counting."""
    config.pluginmanager.register(SkipReport(config.getoption("--no-skips")), "skip-report")


class SkipReport:
    """What passed and what was skipped in one run of pytest."""

    def __init__(self, refuses_skips: bool) -> None:
        self.num_passed = 0
        self.reasons: list[tuple[str, str]] = []
        self._refuses_skips = refuses_skips

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test."""
        if report.when == "call" and report.passed:
            self.num_passed += 1
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Counts a whole file that is skipped."""
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.reasons.append((report.nodeid, reason))

    def unexpected(self) -> Iterator[tuple[str, str]]:
        """What was skipped though it could have run here."""
        for test, reason in self.reasons:
            if not EXPECTED.search(reason):
                yield test, reason

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the counts, and fails the run if it must not have skipped."""
        if COUNTS_VARIABLE in os.environ:
            with Path(os.environ[COUNTS_VARIABLE]).open("a") as file:
                file.write(f"{self.num_passed} {len(self.reasons)}\n")
        if self._refuses_skips and session.exitstatus == pytest.ExitCode.OK and any(self.unexpected()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Names what must not have been skipped."""
        if self._refuses_skips:
            for test, reason in self.unexpected():
                terminalreporter.write_line(f"MUST NOT BE SKIPPED {test}: {reason}", red=True)
