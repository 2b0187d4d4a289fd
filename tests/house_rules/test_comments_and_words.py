"""Source files carry no comments, none of the forbidden words, no ellipsis and nothing of one machine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house_rules.lexer import find_comments, find_ellipses
from tests.house_rules.sources import Finding, Kind, SourceFile, kind_of, report, repository_paths, source_files
from tests.house_rules.words import FORBIDDEN_WORDS, find_foreign_text, find_words

HASH = chr(35)
SLASHES = chr(47) * 2
OPEN, CLOSE = "/" + "*", "*" + "/"
DOTS = "." * 3

REFUSED = [
    (Kind.PYTHON, f"x = '{HASH}'\nx = 1  {HASH} why\n", 2),
    (Kind.PYTHON, f"\n{HASH}!/usr/bin/env python3\n", 2),
    (Kind.PYTHON, "def f() -> int:\n    x = 1\n    'why'\n    return x\n", 3),
    (Kind.PYTHON, f"def f() -> None:\n    {DOTS}\n", 2),
    (Kind.C, f"int x = 1'000'000; {SLASHES} it's\n", 1),
    (Kind.C, f"int x;\nint y {OPEN} why\n why {CLOSE};\n", 2),
    (Kind.C, f"char c = '\"'; {SLASHES} \"\n", 1),
    (Kind.C, f'auto s = R"x(")")x"; {SLASHES} why\n', 1),
    (Kind.C, f'auto s = "\\\\"; {SLASHES} why "\n', 1),
    (Kind.C, f"int y;\n {HASH}  if 0\nint x;\n{HASH}endif\n", 2),
    (Kind.C, "void f() {\n  if constexpr ( false ) {\n  }\n}\n", 2),
    (Kind.SCRIPT, f"const x = '{SLASHES}';\nlet y = 1; {SLASHES} why\n", 2),
    (Kind.SCRIPT, f"a {{\n  b: c; {OPEN} why {CLOSE}\n}}\n", 2),
    (Kind.SCRIPT, f"x = a.replace(/[/'\"]/g, y); {SLASHES} why\n", 1),
    (Kind.SCRIPT, f"x = a / b; {SLASHES} why / not\n", 1),
    (Kind.MARKUP, f"<p>\n<!-{'-'} why -->\n</p>\n", 2),
    (Kind.LINES, f"{HASH}!/bin/sh\n\n{HASH} why\n", 3),
    (Kind.LINES, f"echo a {HASH} why\n", 1),
    (Kind.LINES, f"a: b\n  {HASH}c: d\n", 2),
    (Kind.LINES, f"a = 1;\n  {OPEN} why {CLOSE}\n", 2),
    (Kind.LINES, "[Unit]\n; why\n", 2),
]
ALLOWED = [
    (Kind.PYTHON, f"{HASH}!/usr/bin/env python3\n'''Docstring {HASH}.'''\nx = f'{HASH}{{1}}'\n"),
    (Kind.PYTHON, f"def f(x: tuple[int, {DOTS}]) -> None:\n    'Docstring.'\n    return x[{DOTS}, 0]\n"),
    (Kind.C, f'{HASH}include "a.h"\nconst char* s = "{SLASHES} {OPEN} {CLOSE} if (false)";\n'),
    (Kind.C, "int x = 0x1'0; char c = '/'; char d = '\\''; char e = '\"'; int y = x / 2;\n"),
    (Kind.C, f'auto s = u8R"({SLASHES} ")";\n'),
    (Kind.C, f"template <class{DOTS} T> void f(T{DOTS} x) {{ do {{ }} while (false); }}\n"),
    (Kind.SCRIPT, f"f({DOTS}x); y = `{SLASHES} ${{z}}`; w = /a\\/\\/b/.test(s); v = a / b / c;\n"),
    (Kind.MARKUP, f"<a href='https:{SLASHES}a/{HASH}b'>!</a>\n"),
    (Kind.LINES, f"{HASH}!/bin/sh\necho ${HASH} ${{{HASH}x}} a{HASH}b\ncase x in\n  a) b\n    ;;\nesac\n"),
]


def collect(check: Callable[[SourceFile], list[Finding]]) -> dict[Path, list[Finding]]:
    return {source.path: found for source in source_files() if (found := check(source))}


def test_every_file_is_of_a_known_kind() -> None:
    unknown = [str(path) for path in repository_paths() if kind_of(path) is None]
    assert not unknown, f"teach tests/house_rules/sources.py the kind of: {', '.join(unknown)}"


def test_the_list_has_the_repository() -> None:
    kinds = {source.path: source.kind for source in source_files()}
    assert kinds[Path("run.py")] is Kind.PYTHON and kinds[Path("native/include/glint.h")] is Kind.C
    assert kinds[Path(".ci/run")] is kinds[Path("CMakeLists.txt")] is Kind.LINES


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


@pytest.mark.parametrize(("kind", "text", "line"), REFUSED)
def test_a_comment_is_found(kind: Kind, text: str, line: int) -> None:
    assert [found.line for found in find_comments(text, kind)] == [line]


@pytest.mark.parametrize(("kind", "text"), ALLOWED)
def test_what_is_no_comment_is_left_alone(kind: Kind, text: str) -> None:
    assert find_comments(text, kind) == []
    assert find_ellipses(text, kind) == []


@pytest.mark.parametrize("word", sorted(FORBIDDEN_WORDS))
def test_words_are_found_in_names_and_text(word: str) -> None:
    forms = ["x = '{0}'", "{1}: later", "make_{0}_model", "{2}Model", "a{2}", "{1}_COUNT", "{0}1"]
    for form in forms:
        text = "first line\n" + form.format(word, word.upper(), word.title())
        assert [(found.line, found.what) for found in find_words(text)] == [(2, f"word '{word}'")]
    assert find_words("monkeypatch max_examples stubborn democracy todos mocking") == []


@pytest.mark.parametrize("kind", [Kind.PYTHON, Kind.C, Kind.SCRIPT, Kind.MARKUP, Kind.LINES])
@pytest.mark.parametrize("mark", [DOTS, chr(0x2026)])
def test_ellipsis_in_text_is_found(kind: Kind, mark: str) -> None:
    assert [found.line for found in find_ellipses(f'\nx = "loading{mark}"\n', kind)] == [2]


def test_foreign_text_is_found() -> None:
    foreign = ["/".join(["", "opt", "x"]), "/".join(["open('", "root", "x')"]), "py" + "pi.org"]
    assert [len(find_foreign_text(text)) for text in foreign] == [1, 1, 1]
    assert find_foreign_text("x/opt/y a/work/b") == []


def test_unknown_kinds_are_noticed_and_ignored_files_are_not(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "scratch").mkdir()
    (tmp_path / ".gitignore").write_text("/scratch/\n")
    (tmp_path / "run").write_text(f"{HASH}!/bin/sh\n")
    for name in ("scratch/a.zig", "c.zig"):
        (tmp_path / name).write_text("")
    kinds = [(str(path), kind_of(path, tmp_path)) for path in repository_paths(tmp_path)]
    assert kinds == [(".gitignore", Kind.LINES), ("c.zig", None), ("run", Kind.LINES)]
