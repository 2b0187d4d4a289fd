"""The lexers of the house rules catch what they must and leave strings alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.house_rules.lexer import find_comments, find_ellipses
from tests.house_rules.sources import Kind, kind_of, repository_paths
from tests.house_rules.words import FORBIDDEN_WORDS, find_foreign_text, find_words

HASH = chr(35)
SLASHES = chr(47) * 2
OPEN, CLOSE = "/" + "*", "*" + "/"
DOTS = "." * 3

REFUSED = [
    (Kind.PYTHON, f"x = 1  {HASH} why\n", 1),
    (Kind.PYTHON, f"x = '{HASH}'\n{HASH} why\n", 2),
    (Kind.PYTHON, f"\n{HASH}!/usr/bin/env python3\n", 2),
    (Kind.PYTHON, "def f() -> int:\n    x = 1\n    'why'\n    return x\n", 3),
    (Kind.PYTHON, "x = 1\nf'why {x}'\n", 2),
    (Kind.PYTHON, "class A:\n    x: int = 1\n    'the x'\n", 3),
    (Kind.PYTHON, "if False:\n    pass\n", 1),
    (Kind.PYTHON, "while 0:\n    pass\n", 1),
    (Kind.PYTHON, f"def f() -> None:\n    {DOTS}\n", 2),
    (Kind.PYTHON, f"x = {DOTS}\n", 1),
    (Kind.C, f"int x = 1; {SLASHES} why\n", 1),
    (Kind.C, f"int x;\nint y {OPEN} why\n why {CLOSE};\n", 2),
    (Kind.C, f"int x = 1'000'000; {SLASHES} it's\n", 1),
    (Kind.C, f"char c = '\"'; {SLASHES} \"\n", 1),
    (Kind.C, f'auto s = R"x(")")x"; {SLASHES} why\n', 1),
    (Kind.C, f'auto s = "\\\\"; {SLASHES} why "\n', 1),
    (Kind.C, f"{OPEN} never closed\n", 1),
    (Kind.C, f"{HASH}if 0\nint x;\n{HASH}endif\n", 1),
    (Kind.C, f"int y;\n {HASH}  if false\nint x;\n{HASH}endif\n", 2),
    (Kind.C, "void f() {\n  if (false) {\n  }\n}\n", 2),
    (Kind.C, "void f() {\n  if constexpr ( 0 ) {\n  }\n}\n", 2),
    (Kind.SHELL, f"echo a {HASH} why\n", 1),
    (Kind.SHELL, f"echo 'it'; {HASH} why's\n", 1),
    (Kind.SHELL, f'echo "$(cat "$x")" {HASH} why\n', 1),
    (Kind.SHELL, f"cat <<EOF\nit's\nEOF\n{HASH} why\n", 4),
    (Kind.SHELL, f"python <<'EOF'\nx = 1\n{HASH} why\nEOF\n", 3),
    (Kind.SHELL, f"true\n{HASH}!/bin/sh\n", 2),
    (Kind.CMAKE, f'set(x "a") {HASH} why\n', 1),
    (Kind.CMAKE, f"{HASH}[[ why\n why ]]\n", 1),
    (Kind.TOML, f'x = "a" {HASH} why\n', 1),
    (Kind.TOML, f"x = '{HASH}'\n{HASH} why\n", 2),
    (Kind.YAML, f"a: b {HASH} why\n", 1),
    (Kind.YAML, f"a: it's\nb: c {HASH} isn't\n", 2),
    (Kind.NIX, f'x = "a"; {HASH} why\n', 1),
    (Kind.NIX, f"x = 1;\n{OPEN} why {CLOSE}\n", 2),
    (Kind.IGNORE, f"/build\n{HASH} why\n", 2),
]

ALLOWED = [
    (Kind.PYTHON, f"{HASH}!/usr/bin/env python3\n'''Docstring {HASH}.'''\nx = '{HASH}'\n"),
    (Kind.PYTHON, f"def f(x: tuple[int, {DOTS}]) -> None:\n    'Docstring.'\n    return x[{DOTS}, 0]\n"),
    (Kind.PYTHON, f"x = f'{HASH}{{1}}'\n"),
    (Kind.C, f'{HASH}include "a.h"\nconst char* s = "{SLASHES} {OPEN} {CLOSE}";\n'),
    (Kind.C, "int x = 0x1'0; char c = '/'; char d = '\\''; char e = '\"'; int y = x / 2;\n"),
    (Kind.C, f'auto s = u8R"({SLASHES} ")";\n'),
    (Kind.C, f"template <class{DOTS} T> void f(T{DOTS} x) {{ try {{ }} catch ({DOTS}) {{ }} }}\n"),
    (Kind.C, 'const char* s = "if (false)"; void f() { do { } while (false); }\n'),
    (Kind.SHELL, f"{HASH}!/bin/sh\necho ${HASH} ${{{HASH}x}} ${{x{HASH}y}} \\{HASH} a{HASH}b\n"),
    (Kind.SHELL, f"echo '{HASH} a' \"{HASH} b\"\n"),
    (Kind.CMAKE, f'set(x "a {HASH} b" \\{HASH} [[ {HASH} c ]])\n'),
    (Kind.TOML, f"x = \"a {HASH}\"\ny = '{HASH}'\nz = '''\n{HASH}\n'''\n"),
    (Kind.YAML, f"a: b{HASH}c\nd: \"{HASH} e\"\nf: ' {HASH} g'\n"),
    (Kind.NIX, f'x = "a {HASH} {OPEN}";\ny = \'\'\n{HASH} b\n\'\';\n'),
    (Kind.IGNORE, "/build/\n*.pyc\n"),
]


@pytest.mark.parametrize(("kind", "text", "line"), REFUSED)
def test_refused(kind: Kind, text: str, line: int) -> None:
    assert [found.line for found in find_comments(text, kind)] == [line]


@pytest.mark.parametrize(("kind", "text"), ALLOWED)
def test_allowed(kind: Kind, text: str) -> None:
    assert find_comments(text, kind) == []
    assert find_ellipses(text, kind) == []


@pytest.mark.parametrize("word", sorted(FORBIDDEN_WORDS))
@pytest.mark.parametrize("form", ["x = '{0}'", "{1}: later", "make_{0}_model", "{2}Model", "a{2}", "{1}_COUNT", "{0}1"])
def test_words_are_found(word: str, form: str) -> None:
    text = "first line\n" + form.format(word, word.upper(), word.title())
    assert [(found.line, found.what) for found in find_words(text)] == [(2, f"word '{word}'")]


def test_words_inside_other_words_are_left_alone() -> None:
    assert find_words("monkeypatch max_examples stubborn democracy todos mocking") == []


@pytest.mark.parametrize("kind", [Kind.PYTHON, Kind.C, Kind.SHELL, Kind.TOML, Kind.CMAKE])
@pytest.mark.parametrize("mark", [DOTS, chr(0x2026)])
def test_ellipsis_in_text_is_found(kind: Kind, mark: str) -> None:
    assert [found.line for found in find_ellipses(f'\nx = "loading{mark}"\n', kind)] == [2]


def test_foreign_text_is_found() -> None:
    foreign = ["/".join(["", "opt", "x"]), "/".join(["open('", "root", "x')"]), "py" + "pi.org"]
    assert [len(find_foreign_text(text)) for text in foreign] == [1, 1, 1]
    assert find_foreign_text("x/opt/y a/work/b") == []


def test_a_file_of_no_known_kind_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.zig").write_text("")
    (tmp_path / "run").write_text(f"{HASH}!/bin/sh\n")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "b.zig").write_text("")
    assert [(str(path), kind_of(path, tmp_path)) for path in repository_paths(tmp_path)] == [
        ("a.zig", None),
        ("run", Kind.SHELL),
    ]


def test_what_git_ignores_is_no_source(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("/scratch/\n*.log\n")
    (tmp_path / "scratch").mkdir()
    for name in ("scratch/a.zig", "b.log", "c.zig"):
        (tmp_path / name).write_text("")
    assert [str(path) for path in repository_paths(tmp_path)] == [".gitignore", "c.zig"]
