#!/usr/bin/env python3
"""Fails where a kernel of libglint_cuda.so has code for Hopper alone.

The library is read as `cuobjdump --dump-elf-symbols` reads it: every translation unit has one container (fatbin) with
machine code (cubin) by architecture and PTX. The rules:

1. A kernel with code for sm_90 has code for sm_100, and its container holds compute_90 PTX.
2. A kernel with code for sm_90a has such a sibling: the same name and template arguments with another `Multiply`.
   `HOPPER_ONLY` names the kernels without one.
"""

import argparse
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HOPPER_ONLY = ("attention_prefill_hopper_kernel", "expert_down_rows_kernel")
PORTABLE = frozenset({"sm_90", "sm_100", "compute_90"})
HOPPER = "sm_90a"

CONTAINER = struct.Struct("<IHHQ")
CONTAINER_MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, CONTAINER.size)
ENTRY = struct.Struct("<HHIQIIHHI")
ENTRY_FLAGS_AT = 40
KIND_PTX, KIND_CUBIN = 1, 2
FLAG_SPECIFIC = 0x100000
ELF_MAGIC = b"\x7fELF"
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
SECTION_SYMBOLS = 2
SYMBOL_FUNCTION = 2
SYMBOL_IS_KERNEL = 0x10
MULTIPLY = re.compile(r"\bMultiply\)\d+")


@dataclass(frozen=True)
class Code:
    """The kernels of one cubin by their C++ names, its architecture, and all architectures of its container."""

    architecture: str
    kernels: tuple[str, ...]
    beside: frozenset[str]


def read_code(library: bytes) -> Iterator[Code]:
    """The cubins of every container in a library or an object file."""
    at = library.find(CONTAINER_MAGIC)
    while at >= 0:
        *_, num_bytes = CONTAINER.unpack_from(library, at)
        entries = list(read_entries(library, at + CONTAINER.size, at + CONTAINER.size + num_bytes))
        beside = frozenset(architecture for architecture, _ in entries)
        for architecture, cubin in entries:
            if cubin is not None:
                yield Code(architecture, demangled(read_kernels(cubin)), beside)
        at = library.find(CONTAINER_MAGIC, at + CONTAINER.size + num_bytes)


def read_entries(library: bytes, first: int, end: int) -> Iterator[tuple[str, bytes | None]]:
    """The entries of one container: the architecture with the bytes of a cubin, or with None for PTX."""
    while first < end:
        kind, _, header_bytes, num_bytes, *_, architecture = ENTRY.unpack_from(library, first)
        (flags,) = struct.unpack_from("<Q", library, first + ENTRY_FLAGS_AT)
        begin, first = first + header_bytes, first + header_bytes + num_bytes
        suffix = "a" if flags & FLAG_SPECIFIC else ""
        if kind == KIND_PTX:
            yield f"compute_{architecture}{suffix}", None
        elif kind == KIND_CUBIN:
            cubin = library[begin:first]
            if not cubin.startswith(ELF_MAGIC):
                raise SystemExit(
                    f"kernel_code.py: code for sm_{architecture}{suffix} is compressed and cannot be read: build it "
                    "with nvcc --compress-mode=none"
                )
            yield f"sm_{architecture}{suffix}", cubin


def read_kernels(cubin: bytes) -> Iterator[str]:
    """The symbols of a cubin's kernels."""
    (sections_at,) = struct.unpack_from("<Q", cubin, 40)
    section_bytes, num_sections = struct.unpack_from("<HH", cubin, 58)
    sections = [SECTION.unpack_from(cubin, sections_at + index * section_bytes) for index in range(num_sections)]
    for _, kind, _, _, offset, num_bytes, names, *_ in sections:
        if kind == SECTION_SYMBOLS:
            names_at = sections[names][4]
            for name, info, other, *_ in SYMBOL.iter_unpack(cubin[offset : offset + num_bytes]):
                if info & 0xF == SYMBOL_FUNCTION and other & SYMBOL_IS_KERNEL:
                    yield cubin[names_at + name : cubin.index(b"\0", names_at + name)].decode()


def demangled(symbols: Iterable[str]) -> tuple[str, ...]:
    """The C++ names of symbols."""
    if shutil.which("c++filt") is None:
        raise SystemExit("kernel_code.py: no c++filt found; install binutils")
    ended = subprocess.run(["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True)
    return tuple(ended.stdout.splitlines())


def family(kernel: str) -> str:
    """The name of a kernel and of its siblings: what it multiplies with is left out."""
    return MULTIPLY.sub("Multiply", kernel)


def find_problems(codes: list[Code]) -> list[str]:
    """Every broken rule: a kernel and what it lacks."""
    portable: dict[str, set[str]] = {}
    for code in codes:
        if code.architecture != HOPPER:
            has = {code.architecture} | {name for name in code.beside if name.startswith("compute_")}
            for kernel in code.kernels:
                portable.setdefault(family(kernel), set()).update(has)
    problems = []
    for kernel in sorted({kernel for code in codes for kernel in code.kernels}):
        has = portable.get(family(kernel), set())
        is_hopper_only = not has and any(f"::{name}<" in kernel or f"::{name}(" in kernel for name in HOPPER_ONLY)
        if not has >= PORTABLE and not is_hopper_only:
            found = ", ".join(sorted(has)) or HOPPER
            problems.append(f"{kernel} has code for {found} only, not for {', '.join(sorted(PORTABLE - has))}")
    return problems


def main() -> int:
    """Prints how many kernels every architecture has; exit code 1 where a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", metavar="LIBRARY", type=Path, help="libglint_cuda.so, or an object file of it")
    library = parser.parse_args().library
    codes = list(read_code(library.read_bytes()))
    for architecture in sorted({code.architecture for code in codes}):
        kernels = {kernel for code in codes if code.architecture == architecture for kernel in code.kernels}
        print(f"{architecture}: {len(kernels)} kernels")
    problems = find_problems(codes)
    for problem in problems:
        print(f"kernel_code.py: {problem}", file=sys.stderr)
    if problems or not codes:
        print(
            f"kernel_code.py: {len(problems)} kernels of {library} ({len(codes)} cubins) break a rule. Every kernel "
            f"needs {', '.join(sorted(PORTABLE))}, or a sibling that has them: see cmake/cuda.cmake",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
