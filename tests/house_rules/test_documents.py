"""What the documents say exists: ABI functions have their section; named paths, functions and messages are there."""

from __future__ import annotations

import argparse
import re
import runpy
from pathlib import Path

import pytest

from glint.server.flags import add_flags
from tests.house_rules.sources import KIND_BY_SUFFIX, ROOT, Finding, Kind, line_at, source_files

DOCUMENTS = [
    "README.md",
    "docs/architecture.md",
    "docs/bench.md",
    "docs/deploy.md",
    "docs/reliability.md",
    "docs/results.md",
    "docs/server.md",
    "docs/specification.md",
    "native/cuda/README.md",
    "native/README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
]
ABI_FUNCTION = re.compile(r"\b(glint_[a-z0-9_]+)\s*\(")
KERNEL = re.compile(r"__global__[^;{]*?\b(\w+_kernel)\s*\(")
HEADING = re.compile(r"^\#{1,6}[ \t]+(.*)$", re.MULTILINE)
CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PATH_SHAPE = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
FUNCTION_OF_A_FILE = re.compile(r"([\w/]+\.py)::(\w+)")
MESSAGE_ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--?[a-z][a-z-]*[a-z]")
COUNTED = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "native/**/*.md")
MAX_WORDS = 16_000
MAX_README_LINES = 150
NOT_IN_THE_REPOSITORY = ("build", ".venv", "shared")


def read(name: str) -> str:
    """A document of the repository; its absence is the finding."""
    path = ROOT / name
    assert path.is_file(), f"{name} is missing: the repository promises it"
    return path.read_text(encoding="utf-8")


def undescribed_functions(header: str, document: str) -> list[str]:
    """The ABI functions of the header that no heading of the document names."""
    headings = " ".join(HEADING.findall(document))
    return sorted(name for name in set(ABI_FUNCTION.findall(header)) if not re.search(rf"\b{name}\b", headings))


def unknown_functions(header: str, document: str) -> list[str]:
    """The ABI functions that a heading of the document names and the header does not have."""
    named = set(re.findall(r"\bglint_[a-z0-9_]+\b", " ".join(HEADING.findall(document))))
    return sorted(name for name in named if not re.search(rf"\b{name}\b", header))


def looks_like_a_path(text: str, root: Path) -> bool:
    """Whether a code span names a file or folder of the repository; a bare data file may be one of a model folder."""
    first = text.split("/")[0]
    if not PATH_SHAPE.fullmatch(text) or first.startswith(NOT_IN_THE_REPOSITORY):
        return False
    kind = KIND_BY_SUFFIX.get(Path(text).suffix)
    if "/" in text:
        return (root / first).is_dir() or kind is not None
    return kind not in (None, Kind.DATA) and not text.startswith(("*", "."))


def missing_paths(document: str, folder: Path, root: Path) -> list[Finding]:
    """The paths in backticks that exist neither below the root nor beside the document."""
    findings = []
    for span in CODE_SPAN.finditer(document):
        named = span[1].strip().removeprefix("./").rstrip("/")
        if not looks_like_a_path(named, root):
            continue
        if not any(list(base.glob(named)) for base in (root, folder)):
            findings.append(Finding(line_at(document, span.start()), f"path '{named}' does not exist"))
    return findings


def count_words(root: Path) -> dict[str, int]:
    """The words of each document that a reader is expected to read, as `wc -w` counts them."""
    paths = {path for pattern in COUNTED for path in root.glob(pattern)}
    return {str(path.relative_to(root)): len(path.read_text(encoding="utf-8").split()) for path in sorted(paths)}


def test_documents_are_short() -> None:
    words = count_words(ROOT)
    total = sum(words.values())
    assert total <= MAX_WORDS, f"the documents have {total} words, {MAX_WORDS} at most; say it once and link: {words}"
    lines = len(read("README.md").splitlines())
    assert lines <= MAX_README_LINES, f"README.md has {lines} lines, {MAX_README_LINES} at most; move some to docs/"


def test_words_of_every_document_count(tmp_path: Path) -> None:
    names = ["README.md", "SECURITY.md", "docs/new.md", "native/README.md", "native/cuda/README.md"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("| two words |\n\nand three  more\n")
    assert count_words(tmp_path) == {name: 7 for name in names if name != "SECURITY.md"}


def test_every_abi_function_has_a_section() -> None:
    header = read("native/include/glint.h")
    document = read("native/README.md")
    assert len(set(ABI_FUNCTION.findall(header))) >= 10
    missing = undescribed_functions(header, document)
    assert not missing, f"native/README.md has no heading for: {', '.join(missing)}"
    unknown = unknown_functions(header, document)
    assert not unknown, f"native/README.md has headings for functions that glint.h lacks: {', '.join(unknown)}"


def test_every_cuda_kernel_is_described() -> None:
    document = read("native/cuda/README.md")
    files = [path for path in (ROOT / "native" / "cuda").rglob("*.cu*") if "bench" not in path.parts]
    kernels = {name for path in files for name in KERNEL.findall(path.read_text(encoding="utf-8"))}
    assert len(kernels) > 10
    missing = sorted(name for name in kernels if f"`{name}`" not in document)
    assert not missing, f"native/cuda/README.md does not describe: {', '.join(missing)}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_named_paths_exist(name: str) -> None:
    findings = missing_paths(read(name), (ROOT / name).parent, ROOT)
    assert not findings, "\n".join(f"{name}:{found.line}: {found.what}" for found in findings)


def test_functions_of_commands_exist() -> None:
    named = set(FUNCTION_OF_A_FILE.findall(read("docs/deploy.md")))
    assert len(named) >= 3
    missing = [f"{file}::{name}" for file, name in named if not re.search(rf"^def {name}\(", read(file), re.MULTILINE)]
    assert not missing, f"docs/deploy.md names what is not there: {', '.join(missing)}"


def test_quoted_messages_are_those_of_the_source() -> None:
    troubleshooting = read("docs/deploy.md").split("\n## Troubleshooting\n", 1)[1]
    messages = MESSAGE_ROW.findall(troubleshooting.split("\nMessages of the programs around it", 1)[0])
    assert len(messages) >= 8
    source = "\n".join(one.text for one in source_files() if one.path.parts[0] in ("glint", "native", "deploy"))
    assert not [message for message in messages if message not in source]


def test_the_chart_is_drawn_from_the_results() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "results_chart.py"))
    drawn = script["draw"](script["read_steps"](read("docs/results.md")))
    assert drawn == read("docs/results.svg"), "run scripts/results_chart.py: docs/results.md has other figures"


def test_the_chart_needs_the_table() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "results_chart.py"))
    with pytest.raises(ValueError, match="add the table"):
        script["read_steps"]("no rows")


def test_every_flag_of_the_server_has_a_row() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    flags = set(FLAG.findall(parser.format_usage() + parser.format_help()))
    assert len(flags) > 40
    rows = " ".join(line.split("|")[1] for line in read("docs/server.md").splitlines() if line.startswith("| `"))
    named = {span[1] for span in CODE_SPAN.finditer(rows)}
    assert not flags - named, f"docs/server.md has no row for: {', '.join(sorted(flags - named))}"


def test_a_function_without_a_section_is_found() -> None:
    header = "int glint_a(void);\nint glint_b(int x);\n"
    mark = chr(35) * 2
    assert undescribed_functions(header, f"{mark} `glint_a`\nglint_b is nice\n") == ["glint_b"]
    assert undescribed_functions(header, f"{mark} glint_a\n{mark} `glint_b(x)`\n") == []
    assert unknown_functions(header, f"{mark} glint_a, glint_c\n") == ["glint_c"]


def test_a_missing_path_is_found(tmp_path: Path) -> None:
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "a.h").touch()
    fine = "`native/a.h`, `a.h`, `./native/`, `x + y`, `glint.LLM`, `--flag`, `build/lib.so`, `/health`, `config.json`"
    text = f"See {fine}.\n`native/b.h` `c.py`"
    assert [found.what for found in missing_paths(text, tmp_path / "native", tmp_path)] == [
        "path 'native/b.h' does not exist",
        "path 'c.py' does not exist",
    ]
    assert [found.line for found in missing_paths(text, tmp_path / "native", tmp_path)] == [2, 2]
