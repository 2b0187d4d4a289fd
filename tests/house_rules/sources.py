"""The files of this repository and the kind of each; a file of no known kind is refused rather than left unchecked."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Kind(Enum):
    """How a file is checked; PROSE and DATA are not source."""

    PYTHON = "Python"
    C = "C and C++"
    SCRIPT = "JavaScript and CSS"
    MARKUP = "HTML"
    LINES = "shell and settings, read line by line"
    PROSE = "prose"
    DATA = "data"


NAMES = {
    Kind.LINES: "CMakeLists.txt Dockerfile .gitignore .gitattributes .replit .clang-tidy .clang-format",
    Kind.PROSE: "LICENSE NOTICE",
}
SUFFIXES = {
    Kind.PYTHON: ".py .pyi",
    Kind.C: ".c .h .cpp .hpp .cu .cuh .inc",
    Kind.SCRIPT: ".js .css",
    Kind.MARKUP: ".html",
    Kind.LINES: ".sh .conf .service .dockerignore .nix .cmake .toml .yaml .yml",
    Kind.PROSE: ".md",
    Kind.DATA: ".txt .json .lock .jinja .npz .bin .png .safetensors .svg",
}
KIND_BY_NAME = {name: kind for kind, names in NAMES.items() for name in names.split()}
KIND_BY_SUFFIX = {suffix: kind for kind, suffixes in SUFFIXES.items() for suffix in suffixes.split()}


@dataclass(frozen=True)
class SourceFile:
    """One source file: its path below the root, its kind and its text."""

    path: Path
    kind: Kind
    text: str


@dataclass(frozen=True)
class Finding:
    """One violation: the line it is on and what is wrong there."""

    line: int
    what: str


def repository_paths(root: Path = ROOT) -> Iterator[Path]:
    """The files that git has or would take, as relative paths in order."""
    command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    yield from (Path(name) for name in sorted(listed.split("\0")) if name and (root / name).is_file())


def kind_of(path: Path, root: Path = ROOT) -> Kind | None:
    """The kind of a file, by its name or, without a suffix, by its shebang; None if neither is known."""
    known = KIND_BY_NAME.get(path.name) or KIND_BY_SUFFIX.get(path.suffix)
    if known is None and not path.suffix:
        first = (root / path).read_bytes().split(b"\n", 1)[0]
        if first.startswith(b"#!"):
            return Kind.PYTHON if b"python" in first else Kind.LINES
    return known


@cache
def source_files(root: Path = ROOT) -> list[SourceFile]:
    """Every file that the house rules speak of."""
    files = []
    for path in repository_paths(root):
        kind = kind_of(path, root)
        if kind is not None and kind not in (Kind.PROSE, Kind.DATA):
            files.append(SourceFile(path, kind, (root / path).read_text(encoding="utf-8")))
    return files


@cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a Python text."""
    return ast.parse(text)


def line_at(text: str, offset: int) -> int:
    """The number, from 1, of the line that holds an offset."""
    return text.count("\n", 0, offset) + 1


def report(findings: dict[Path, list[Finding]]) -> str:
    """The violations as path:line lines, for an assertion message."""
    return "\n".join(f"{path}:{found.line}: {found.what}" for path, per in findings.items() for found in per)
