"""The ctypes mirror is equal to the C header, by text and by what a C compiler makes of it."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from glint.native import abi

HEADER = Path(__file__).parents[2] / "native" / "include" / "glint.h"
SCALARS = {
    "char": ctypes.c_char,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "glint_status": ctypes.c_int32,
}


def header_text() -> str:
    return HEADER.read_text()


def mirror_name(c_name: str) -> str:
    return "".join(word.capitalize() for word in c_name.removeprefix("glint_").split("_"))


def mirror_type(c_type: str) -> type:
    """The ctypes type that stands for a type as it is written in the header."""
    words = c_type.replace("const ", "").strip()
    if words.endswith("]"):
        element, length = words[:-1].split("[")
        return mirror_type(element) * int(length)
    if words == "char*":
        return ctypes.c_char_p
    if words.endswith("*"):
        return ctypes.POINTER(mirror_type(words[:-1]))
    return SCALARS.get(words) or getattr(abi, mirror_name(words))


def split_declaration(declaration: str) -> tuple[str, str]:
    c_type, name, length = re.fullmatch(r"\s*(.+?)\s*(\w+)(\[\d+\])?\s*", declaration, re.DOTALL).groups()
    return c_type + (length or ""), name


def header_constants() -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"#define GLINT_(\w+) (\d+)", header_text())}


def header_structs() -> dict[str, list[tuple[str, str]]]:
    found = re.findall(r"typedef struct (\w+) \{(.*?)\} \1;", header_text(), re.DOTALL)
    return {name: [split_declaration(line) for line in body.split(";") if line.strip()] for name, body in found}


def header_functions() -> dict[str, tuple[str, list[str]]]:
    found = re.findall(r"GLINT_API (?!__)(.+?)(\w+)\(([^)]*)\);", header_text())
    return {
        name: (result, [] if arguments == "void" else [split_declaration(part)[0] for part in arguments.split(",")])
        for result, name, arguments in found
    }


def mirror_structs() -> dict[str, type[ctypes.Structure]]:
    return {
        name: kind
        for name, kind in vars(abi).items()
        if isinstance(kind, type) and issubclass(kind, ctypes.Structure) and hasattr(kind, "_fields_")
    }


def test_the_parser_sees_the_whole_header() -> None:
    text = header_text()
    assert len(header_structs()) == text.count("typedef struct") - 1 > 10
    assert len(header_functions()) == text.count("GLINT_API ") - 1 > 10
    assert len(header_constants()) == text.count("#define GLINT_") - 2 > 40


def test_constants_are_equal() -> None:
    mirrored = {name: value for name, value in vars(abi).items() if name.isupper() and isinstance(value, int)}
    assert mirrored == header_constants()


def test_struct_fields_are_equal() -> None:
    expected = {
        mirror_name(struct): [(field, mirror_type(c_type)) for c_type, field in fields]
        for struct, fields in header_structs().items()
    }
    assert {name: list(kind._fields_) for name, kind in mirror_structs().items()} == expected


def test_function_signatures_are_equal() -> None:
    expected = {
        name: (mirror_type(result), tuple(mirror_type(argument) for argument in arguments))
        for name, (result, arguments) in header_functions().items()
    }
    assert abi.FUNCTIONS == expected


def c_layout(folder: Path, compiler: str) -> dict[tuple[str, str], int]:
    """Sizes and offsets of every struct, as a compiled C program prints them."""
    lines = []
    for struct, fields in header_structs().items():
        lines.append(f'  printf("{struct} sizeof %zu\\n", sizeof({struct}));')
        lines += [f'  printf("{struct} {field} %zu\\n", offsetof({struct}, {field}));' for _, field in fields]
    source = folder / "layout.c"
    body = "\n".join(lines)
    source.write_text(
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{\n{body}\n  return 0;\n}}\n'
    )
    program = folder / "layout"
    subprocess.run([compiler, "-std=c11", "-Wall", "-Werror", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    rows = (line.split() for line in printed.splitlines())
    return {(struct, field): int(value) for struct, field, value in rows}


def test_layout_is_what_the_c_compiler_makes(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler on the path")
    mirrored = {}
    for struct, fields in header_structs().items():
        kind = getattr(abi, mirror_name(struct))
        mirrored[struct, "sizeof"] = ctypes.sizeof(kind)
        mirrored |= {(struct, field): getattr(kind, field).offset for _, field in fields}
    assert mirrored == c_layout(tmp_path, compiler)


def test_sized_fills_struct_bytes() -> None:
    ticket = abi.sized(abi.Ticket, step=7)
    assert (ticket.struct_bytes, ticket.step, ticket.missing_pages) == (ctypes.sizeof(abi.Ticket), 7, 0)
