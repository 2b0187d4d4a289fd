"""Small files, small functions, documented: what keeps the code auditable."""

from __future__ import annotations

import ast

from tests.house_rules.sources import Kind, parsed, source_files

MAX_FILE_LINES = 600
MAX_KERNEL_LINES = 800
MAX_FUNCTION_LINES = 60
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
FORBIDDEN_MODULE_NAMES = {"utils", "util", "helpers", "misc", "common"}
FORBIDDEN_CLASS_ENDS = ("Manager", "Handler", "Helper", "Base")


def long_functions(text: str) -> list[tuple[str, int]]:
    """The functions of a Python text that are over the budget, with their lengths in lines."""
    functions = [node for node in ast.walk(parsed(text)) if isinstance(node, FUNCTION)]
    lengths = [(node.name, (node.end_lineno or node.lineno) - node.lineno + 1) for node in functions]
    return [(name, length) for name, length in lengths if length > MAX_FUNCTION_LINES]


def undocumented(text: str) -> list[str]:
    """The public classes and functions of a Python module, and the module itself, that have no docstring."""
    tree = parsed(text)
    owners = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    nodes = [node for owner in owners for node in owner.body if isinstance(node, FUNCTION | ast.ClassDef)]
    names = [node.name for node in nodes if not node.name.startswith("_") and ast.get_docstring(node) is None]
    return names if ast.get_docstring(tree) or not tree.body else ["the module itself", *names]


def test_files_are_short() -> None:
    limits = {".cu": MAX_KERNEL_LINES, ".cuh": MAX_KERNEL_LINES}
    lengths = {source.path: len(source.text.splitlines()) for source in source_files()}
    long_files = [
        f"{path}: {length} lines"
        for path, length in lengths.items()
        if length > limits.get(path.suffix, MAX_FILE_LINES)
    ]
    assert not long_files, f"over {MAX_FILE_LINES} lines, or {MAX_KERNEL_LINES} of a kernel:\n" + "\n".join(long_files)


def test_python_functions_are_short() -> None:
    found = [
        f"{source.path}: {name} has {length} lines"
        for source in source_files()
        if source.kind is Kind.PYTHON
        for name, length in long_functions(source.text)
    ]
    assert not found, f"over {MAX_FUNCTION_LINES} lines:\n" + "\n".join(found)


def test_public_names_of_the_package_are_documented() -> None:
    found = [
        f"{source.path}: {name}"
        for source in source_files()
        if source.kind is Kind.PYTHON and source.path.parts[0] in ("glint", "run.py")
        for name in undocumented(source.text)
    ]
    assert not found, "without a docstring:\n" + "\n".join(found)


def test_names_say_what_a_thing_is() -> None:
    found = [str(source.path) for source in source_files() if source.path.stem in FORBIDDEN_MODULE_NAMES]
    for source in source_files():
        if source.kind is Kind.PYTHON:
            classes = [node.name for node in ast.walk(parsed(source.text)) if isinstance(node, ast.ClassDef)]
            found += [f"{source.path}: {name}" for name in classes if name.endswith(FORBIDDEN_CLASS_ENDS)]
    assert not found, "rename after the thing itself:\n" + "\n".join(found)


def test_a_long_function_and_a_missing_docstring_are_found() -> None:
    body = "".join(f"    x{n} = {n}\n" for n in range(MAX_FUNCTION_LINES))
    assert long_functions("def f() -> None:\n" + body) == [("f", MAX_FUNCTION_LINES + 1)]
    assert long_functions("def f() -> None:\n" + body.split("\n", 1)[1]) == []
    text = "class A:\n    'A.'\n    def f(self) -> None:\n        pass\n    def _g(self) -> None:\n        pass\n"
    assert undocumented(text) == ["the module itself", "f"]
