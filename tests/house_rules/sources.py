"""The files of this repository and the kind of each; a file of no known kind is refused rather than left unchecked."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

SKIPPED_FOLDERS = {".git", ".venv", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "__pycache__", "dist"}
SKIPPED_PREFIXES = ("build",)


class Kind(Enum):
    """What a file is written in; PROSE and DATA are not source."""

    PYTHON = "Python"
    C = "C and C++"
    SHELL = "shell"
    CMAKE = "CMake"
    TOML = "TOML"
    YAML = "YAML"
    NIX = "Nix"
    IGNORE = "ignore list"
    PROSE = "prose"
    DATA = "data"


KIND_BY_NAME = {
    "CMakeLists.txt": Kind.CMAKE,
    ".gitignore": Kind.IGNORE,
    ".gitattributes": Kind.IGNORE,
    "Dockerfile": Kind.SHELL,
    ".replit": Kind.TOML,
    ".clang-tidy": Kind.YAML,
    ".clang-format": Kind.YAML,
    "LICENSE": Kind.PROSE,
    "NOTICE": Kind.PROSE,
    ".prepare.lock": Kind.DATA,
}
KIND_BY_SUFFIX = {
    ".py": Kind.PYTHON,
    ".pyi": Kind.PYTHON,
    ".c": Kind.C,
    ".h": Kind.C,
    ".cpp": Kind.C,
    ".hpp": Kind.C,
    ".cu": Kind.C,
    ".cuh": Kind.C,
    ".inc": Kind.C,
    ".sh": Kind.SHELL,
    ".conf": Kind.SHELL,
    ".service": Kind.SHELL,
    ".dockerignore": Kind.IGNORE,
    ".nix": Kind.NIX,
    ".cmake": Kind.CMAKE,
    ".toml": Kind.TOML,
    ".yaml": Kind.YAML,
    ".yml": Kind.YAML,
    ".md": Kind.PROSE,
    ".txt": Kind.DATA,
    ".json": Kind.DATA,
    ".jinja": Kind.DATA,
    ".npz": Kind.DATA,
    ".bin": Kind.DATA,
    ".png": Kind.DATA,
    ".svg": Kind.DATA,
}


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


def ignored_paths(root: Path) -> set[Path]:
    """What git ignores below root, whole folders named once; nothing where root is no checkout."""
    command = ["git", "-C", str(root), "ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z"]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return set()
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return {root / name for name in listed.split("\0") if name}


def repository_paths(root: Path = ROOT) -> Iterator[Path]:
    """Every file of the repository below root, without ignored files and caches, as relative paths in order."""
    ignored = ignored_paths(root)
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(
            name
            for name in folders
            if name not in SKIPPED_FOLDERS
            and here / name not in ignored
            and not (here == root and name.startswith(SKIPPED_PREFIXES))
            and not (here / name / "pyvenv.cfg").exists()
        )
        yield from ((here / name).relative_to(root) for name in sorted(names) if here / name not in ignored)


def kind_of(path: Path, root: Path = ROOT) -> Kind | None:
    """The kind of a file, by its name or, without a suffix, by its shebang; None if neither is known."""
    known = KIND_BY_NAME.get(path.name) or KIND_BY_SUFFIX.get(path.suffix)
    if known is None and not path.suffix:
        first = (root / path).read_bytes().split(b"\n", 1)[0]
        if first.startswith(b"#!"):
            return Kind.PYTHON if b"python" in first else Kind.SHELL
    return known


def source_files(root: Path = ROOT) -> list[SourceFile]:
    """Every file that the house rules speak of."""
    files = []
    for path in repository_paths(root):
        kind = kind_of(path, root)
        if kind is not None and kind not in (Kind.PROSE, Kind.DATA):
            files.append(SourceFile(path, kind, (root / path).read_text(encoding="utf-8")))
    return files


def report(findings: dict[Path, list[Finding]]) -> str:
    """The violations as path:line lines, for an assertion message."""
    return "\n".join(f"{path}:{found.line}: {found.what}" for path, per in findings.items() for found in per)
