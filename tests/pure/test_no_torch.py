"""What runs by default imports no torch: the files of these folders, and all that they import from tests."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/pure", "tests/cpu", "tests/e2e")
NEEDS_TORCH = ("torch", "safetensors.torch", "transformers.models.glm4_moe.modeling_glm4_moe")


def imported(path: Path) -> Iterator[str]:
    """Full names of the modules and of the names that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def needs_torch(path: Path, seen: set[Path]) -> list[str]:
    """Chains of files that lead to an import that needs torch."""
    seen.add(path)
    chains = []
    for name in imported(path):
        if any(name == needed or name.startswith(f"{needed}.") for needed in NEEDS_TORCH):
            chains.append(f"{path.relative_to(ROOT)} imports {name}")
        used = ROOT / f"{name.replace('.', '/')}.py"
        if name.startswith("tests.") and used.is_file() and used not in seen:
            chains += [f"{path.relative_to(ROOT)}, {chain}" for chain in needs_torch(used, seen)]
    return chains


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_leads_to_torch(folder: str) -> None:
    seen: set[Path] = set()
    files = sorted((ROOT / folder).glob("*.py"))
    assert len(files) > 10
    assert [chain for path in files if path not in seen for chain in needs_torch(path, seen)] == []


def test_torch_is_found_through_other_files() -> None:
    chains = needs_torch(ROOT / "tests" / "reference" / "store.py", set())
    assert any("transformers_reference.py imports torch" in chain for chain in chains)
