"""The arrows of the design: who may import or include whom."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.house_rules.sources import ROOT, Kind, parsed, source_files

MAY_IMPORT = {
    "glint.errors": (),
    "glint.scheduling": ("glint.errors", "glint.scheduling"),
    "glint.text": ("glint.errors", "glint.text"),
    "glint.checkpoint": ("glint.errors", "glint.checkpoint"),
    "glint.native": ("glint.errors", "glint.native", "glint.checkpoint"),
}
NEVER_IMPORTS = {"glint.server": ("glint.native",)}
NEVER_IN_THE_COMPUTE_PATH = ("torch", "vllm", "triton", "onnxruntime", "tensorflow", "jax")
NEVER_INCLUDES = {
    "native/cpu": ("cuda",),
    "native/cuda": ("cpu",),
    "native/base": ("cpu", "cuda", "engine", "model"),
    "native/model": ("cpu", "cuda"),
}
INCLUDE = re.compile(r'^[ \t]*\#[ \t]*include[ \t]*["<]([^">]+)[">]', re.MULTILINE)


def within(module: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of the packages or inside one."""
    return any(module == package or module.startswith(package + ".") for package in packages)


def module_name(path: Path) -> str:
    """The dotted name of a Python file below the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(text: str) -> set[str]:
    """Every module a Python text imports, at the top or inside a function; relative imports start with a dot."""
    found: set[str] = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            found |= {f"{base}.{alias.name}" for alias in node.names} if base == "glint" else {base}
    return found


def import_problems(module: str, text: str) -> list[str]:
    """What a module imports against the arrows, in sentences."""
    imported = imported_modules(text)
    problems = [f"{module} has the relative import '{name}'" for name in sorted(imported) if name.startswith(".")]
    ours = sorted(name for name in imported if within(name, ("glint",)))
    for package, allowed in MAY_IMPORT.items():
        if within(module, (package,)):
            problems += [f"{module} imports {name}" for name in ours if not within(name, allowed)]
    for package, refused in NEVER_IMPORTS.items():
        if within(module, (package,)):
            problems += [f"{module} imports {name}" for name in ours if within(name, refused)]
    foreign = sorted(name for name in imported if within(name, NEVER_IN_THE_COMPUTE_PATH))
    return problems + [f"{module} imports {name}: the engine computes by itself" for name in foreign]


def include_problems(path: Path, text: str) -> list[str]:
    """What a native file includes against the arrows, in sentences."""
    problems = []
    for folder, refused in NEVER_INCLUDES.items():
        if path.as_posix().startswith(folder + "/"):
            included = [Path(name).parts for name in INCLUDE.findall(text)]
            problems += [f"{path} includes {'/'.join(parts)}" for parts in included if set(parts[:-1]) & set(refused)]
    return problems


def test_python_imports_follow_the_arrows() -> None:
    modules = [source for source in source_files() if source.kind is Kind.PYTHON and source.path.parts[0] == "glint"]
    assert len(modules) > 5
    problems = [text for source in modules for text in import_problems(module_name(source.path), source.text)]
    assert not problems, "\n".join(problems)


def test_native_includes_follow_the_arrows() -> None:
    files = [source for source in source_files() if source.kind is Kind.C and source.path.parts[0] == "native"]
    assert len(files) > 5
    problems = [text for source in files for text in include_problems(source.path, source.text)]
    assert not problems, "\n".join(problems)


def test_the_listed_packages_exist() -> None:
    missing = [name for name in MAY_IMPORT if not list(ROOT.glob(name.replace(".", "/") + "*"))]
    assert not missing


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("glint.scheduling.plan", "from glint.native.abi import Model"),
        ("glint.scheduling.plan", "from glint import native"),
        ("glint.scheduling.plan", "import glint.text"),
        ("glint.scheduling.plan", "def f() -> None:\n    from glint import LLM\n"),
        ("glint.text.chat", "from glint.checkpoint.config import read"),
        ("glint.checkpoint", "from glint.engine import Engine"),
        ("glint.server.app", "from glint.native import library"),
        ("glint.text.chat", "from .tokenizer import Tokenizer"),
        ("glint.engine", "import torch.nn"),
    ],
)
def test_a_forbidden_import_is_found(module: str, text: str) -> None:
    assert len(import_problems(module, text)) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("glint.scheduling.plan", "from glint.errors import GlintError\nfrom glint.scheduling.request import Request"),
        ("glint.server.app", "from glint.engine import Engine\nimport torchless"),
        ("glint.engine", "from glint.native.library import load\nfrom glint.text.chat import render"),
    ],
)
def test_an_allowed_import_passes(module: str, text: str) -> None:
    assert import_problems(module, text) == []


@pytest.mark.parametrize(
    ("path", "name", "count"),
    [
        ("native/cpu/attention.cpp", "cuda/kernels/attention/attention.h", 1),
        ("native/cuda/kernels/attention/attention.cu", "../cpu/attention.h", 1),
        ("native/cuda/kernels/attention/attention.cu", "native/cpu/attention.h", 1),
        ("native/base/fp8.h", "engine/pages.h", 1),
        ("native/cpu/attention.cpp", "cpu/team.h", 0),
        ("native/cuda/kernels/attention/attention.cu", "cuda.h", 0),
    ],
)
def test_includes(path: str, name: str, count: int) -> None:
    directive = chr(35) + f' include "{name}"\n'
    assert len(include_problems(Path(path), "int x;\n" + directive)) == count
