"""The arrows of the design: who may import or include whom."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.house_rules.sources import ROOT, Kind, parsed, source_files

SCHEDULER = tuple(
    f"glint.engine.{name}" for name in ("scheduler", "key_queue", "scheduled_request", "share", "step_plan")
)
BELOW_THE_ENGINE = (
    "glint.errors",
    "glint.sampling",
    "glint.terminal",
    "glint.checkpoint",
    "glint.native",
    "glint.text",
)
BELOW_THE_SERVER = ("glint.errors", "glint.sampling", "glint.checkpoint", "glint.text", "glint.engine", "glint.flags")
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "glint.errors": (),
    "glint.terminal": (),
    "glint.sampling": ("glint.errors",),
    "glint.text": ("glint.errors", "glint.text"),
    "glint.checkpoint": ("glint.errors", "glint.checkpoint"),
    "glint.native": ("glint.errors", "glint.native"),
    "glint.sample": ("glint.errors", "glint.checkpoint.safetensors", "glint.sample"),
    "glint.engine": (*BELOW_THE_ENGINE, "glint.engine"),
    **dict.fromkeys(SCHEDULER, ("glint.errors", *SCHEDULER)),
    "glint.llm": (*BELOW_THE_ENGINE, "glint.engine"),
    "glint.flags": ("glint.checkpoint.hub", "glint.engine.args", "glint.llm", "glint.sample"),
    "glint.server": (*BELOW_THE_SERVER, "glint.server", "glint.__version__"),
    "glint.gpu": (*BELOW_THE_ENGINE, "glint.engine", "glint.bench.rank_shapes", "glint.gpu"),
    "glint.bench": (*BELOW_THE_ENGINE, "glint.engine", "glint.flags", "glint.sample", "glint.bench"),
}
ABOVE_THE_PACKAGE = ("deploy", "scripts", "tests")
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


def import_graph(texts: dict[str, str]) -> dict[str, set[str]]:
    """The modules of `texts` that each module imports, at the top, inside a function or for its types alone."""
    graph: dict[str, set[str]] = {}
    for module, text in texts.items():
        found = imported_modules(text)
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
        graph[module] = found & texts.keys()
    return graph


def find_circle(texts: dict[str, str]) -> list[str]:
    """The modules of an import circle in their order, the first of them again at the end; empty where there is none."""
    return circle_of(import_graph(texts))


def include_circle(texts: dict[str, str]) -> list[str]:
    """The same for native files by their paths below native/."""
    return circle_of({path: set(INCLUDE.findall(text)) for path, text in texts.items()})


def circle_of(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The nodes of a circle, the first of them again at the end; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        return list(circle.args[1])
    return []


def import_problems(module: str, text: str) -> list[str]:
    """What a module imports against the arrows, in sentences."""
    imported = imported_modules(text)
    problems = [f"{module} has the relative import '{name}'" for name in sorted(imported) if name.startswith(".")]
    ours = sorted(name for name in imported if within(name, ("glint",)))
    for package, allowed in MAY_IMPORT.items():
        if within(module, (package,)):
            problems += [f"{module} imports {name}" for name in ours if not within(name, allowed)]
    problems += [f"{module} imports {name}" for name in sorted(imported) if within(name, ABOVE_THE_PACKAGE)]
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


def package_texts() -> dict[str, str]:
    """The text of every module of glint, by its dotted name."""
    texts = {
        module_name(source.path): source.text
        for source in source_files()
        if source.kind is Kind.PYTHON and source.path.parts[0] == "glint"
    }
    assert len(texts) > 50
    return texts


def test_python_imports_follow_the_arrows() -> None:
    texts = package_texts()
    problems = [problem for module, text in texts.items() for problem in import_problems(module, text)]
    assert not problems, "\n".join(problems)


def test_no_module_imports_in_a_circle() -> None:
    circle = find_circle(package_texts())
    assert not circle, " -> ".join(circle)


@pytest.mark.parametrize(
    "last",
    [
        "import glint.llm",
        "from glint import llm",
        "from glint.llm import LLM",
        "def show() -> None:\n    from glint.llm import LLM\n",
        "if TYPE_CHECKING:\n    from glint.llm import LLM\n",
    ],
)
def test_a_circle_is_found(last: str) -> None:
    planted = {
        "glint.llm": "from glint.engine import memory_plan",
        "glint.engine.memory_plan": "from glint.terminal import print_table",
        "glint.terminal": last,
        "glint.cli": "from glint.llm import LLM",
    }
    circle = find_circle(planted)
    assert circle[0] == circle[-1] and set(circle) == planted.keys() - {"glint.cli"}
    assert not find_circle(planted | {"glint.terminal": "import sys"})


def test_native_includes_follow_the_arrows() -> None:
    files = [source for source in source_files() if source.kind is Kind.C and source.path.parts[0] == "native"]
    assert len(files) > 5
    problems = [text for source in files for text in include_problems(source.path, source.text)]
    assert not problems, "\n".join(problems)


def test_no_native_file_includes_in_a_circle() -> None:
    files = [source for source in source_files() if source.kind is Kind.C and source.path.parts[0] == "native"]
    circle = include_circle({source.path.relative_to("native").as_posix(): source.text for source in files})
    assert not circle, " -> ".join(circle)


def test_a_circle_of_includes_is_found() -> None:
    def including(name: str) -> str:
        return chr(35) + f'include "{name}"\n'

    planted = {"cuda/backend.h": including("cuda/layers.h"), "cuda/layers.h": including("cuda/backend.h")}
    assert set(include_circle(planted)) == planted.keys()
    assert not include_circle(planted | {"cuda/layers.h": ""})


def test_the_listed_packages_exist() -> None:
    missing = [name for name in MAY_IMPORT if not list(ROOT.glob(name.replace(".", "/") + "*"))]
    assert not missing


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("glint.engine.scheduler", "from glint.native.abi import Model"),
        ("glint.engine.scheduler", "from glint.engine.settings import EngineSettings"),
        ("glint.engine.engine", "from glint.server.service import EngineService"),
        ("glint.engine.engine", "from glint.llm import LLM"),
        ("glint.text.chat", "from glint import native"),
        ("glint.text.chat", "import glint.server"),
        ("glint.text.chat", "def f() -> None:\n    from glint import LLM\n"),
        ("glint.text.chat", "from glint.checkpoint.config import read"),
        ("glint.checkpoint", "from glint.engine.engine import Engine"),
        ("glint.server.app", "from glint.native import library"),
        ("glint.server.app", "from glint.bench.load import run_load"),
        ("glint.bench.cpu", "from glint.server.app import make_app"),
        ("glint.llm", "from glint.cli import main"),
        ("glint.cli", "from deploy import modal_steps"),
        ("glint.text.chat", "from .tokenizer import Tokenizer"),
        ("glint.engine.engine", "import torch.nn"),
    ],
)
def test_a_forbidden_import_is_found(module: str, text: str) -> None:
    assert len(import_problems(module, text)) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("glint.engine.scheduler", "from glint.errors import RequestError\nfrom glint.engine.share import Share"),
        ("glint.server.app", "from glint.engine.engine import Engine\nimport torchless"),
        ("glint.engine.engine", "from glint.native.library import load\nfrom glint.text.chat import render"),
        ("glint.cli", "from glint.server.serve import serve\nfrom glint.bench import rank"),
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
