"""Source files carry no comments, none of the forbidden words, no ellipsis and nothing of one machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.house_rules.lexer import find_comments, find_ellipses
from tests.house_rules.sources import Finding, Kind, SourceFile, kind_of, report, repository_paths, source_files
from tests.house_rules.words import find_foreign_text, find_words


def collect(check: Callable[[SourceFile], list[Finding]]) -> dict[Path, list[Finding]]:
    return {source.path: found for source in source_files() if (found := check(source))}


def test_every_file_is_of_a_known_kind() -> None:
    unknown = [str(path) for path in repository_paths() if kind_of(path) is None]
    assert not unknown, f"teach tests/house_rules/sources.py the kind of: {', '.join(unknown)}"


def test_the_walk_sees_the_repository() -> None:
    kinds = {source.kind for source in source_files()}
    assert kinds >= {Kind.PYTHON, Kind.C, Kind.SHELL, Kind.CMAKE, Kind.TOML, Kind.IGNORE}
    assert {Path(".ci/run"), Path("run.py"), Path("native/include/glint.h")} <= {s.path for s in source_files()}


def test_no_comments() -> None:
    findings = collect(lambda source: find_comments(source.text, source.kind))
    assert not findings, report(findings)


def test_no_forbidden_words() -> None:
    findings = collect(lambda source: find_words(source.text))
    assert not findings, report(findings)


def test_no_ellipsis_in_text() -> None:
    findings = collect(lambda source: find_ellipses(source.text, source.kind))
    assert not findings, report(findings)


def test_nothing_of_one_machine() -> None:
    findings = collect(lambda source: find_foreign_text(source.text))
    assert not findings, report(findings)
