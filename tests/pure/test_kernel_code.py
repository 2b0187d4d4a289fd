"""scripts/kernel_code.py on a library of a few bytes with containers as nvcc writes them."""

import runpy
import struct
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "kernel_code.py"
SPECIFIC = 0x100000
SASS = [("sm", 90, 0), ("sm", 100, 0)]
PTX = [("compute", 90, 0)]
HOPPER = [("sm", 90, SPECIFIC)]
KERNEL = "_ZN5glint4cuda11gemm_kernelILNS0_8MultiplyE{}ELi{}EEEvPi"
SHAPED = "_ZN5glint4cuda4downINS0_5ShapeILNS0_8MultiplyE{0}EEELS3_{0}EEEvPi"
ATTENTION = "_ZN5glint4cuda31attention_prefill_hopper_kernelILi{}EEEvPi"
DEVICE_FUNCTION = "helper"


def cubin(kernels: list[str]) -> bytes:
    """An ELF file with a symbol table and its names: the kernels, and a function that is none."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in [*kernels, DEVICE_FUNCTION])
    symbols, at = b"", 1
    for name in [*kernels, DEVICE_FUNCTION]:
        symbols += struct.pack("<IBBHQQ", at, 0x12, 0 if name == DEVICE_FUNCTION else 0x10, 1, 0, 0)
        at += len(name) + 1
    sections = struct.pack("<IIQQQQIIQQ", 0, 2, 0, 0, 64, len(symbols), 1, 0, 8, 24)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64 + len(symbols), len(names), 0, 0, 1, 0)
    header = b"\x7fELF".ljust(40, b"\0") + struct.pack("<QIHHHHHH", 64 + len(symbols + names), 0, 64, 0, 0, 64, 2, 1)
    return header + symbols + names + sections


def container(kernels: list[str], codes: list[tuple[str, int, int]], payload: bytes | None = None) -> bytes:
    """One translation unit's code for the architectures."""
    entries = b""
    for kind, architecture, flags in codes:
        body = b"compressed text" if kind == "compute" else payload or cubin(kernels)
        number = 1 if kind == "compute" else 2
        entries += struct.pack("<HHIQIIHHIIIQQQ", number, 0, 64, len(body), 0, 0, 0, 0, architecture, 0, 0, flags, 0, 0)
        entries += body
    return b"\x7fELF around it" + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def run(path: Path, library: bytes, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of the script, or what it says as it ends."""
    path.write_bytes(library)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return ended.value.code


def pair(hopper: list[str], portable: list[str]) -> bytes:
    """A library of two translation units."""
    return container(hopper, HOPPER) + container(portable, SASS + PTX)


@pytest.mark.parametrize(
    "library",
    [
        container([KERNEL.format(1, 8)], SASS + PTX),
        pair([KERNEL.format(0, 8), KERNEL.format(0, 16)], [KERNEL.format(1, 8), KERNEL.format(1, 16)]),
        pair([SHAPED.format(0)], [SHAPED.format(1)]),
        pair([ATTENTION.format(1)], [KERNEL.format(1, 8)]),
        container([], HOPPER) + container([KERNEL.format(1, 8)], SASS + PTX),
    ],
)
def test_kernels_for_every_gpu_pass(library: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path / "library.so", library, monkeypatch) == 0


@pytest.mark.parametrize(
    ("library", "problem"),
    [
        (container([KERNEL.format(0, 8)], HOPPER), "code for sm_90a only, not for compute_90, sm_100, sm_90"),
        (pair([KERNEL.format(0, 8)], [KERNEL.format(1, 16)]), "0, 8>(int*) has code for sm_90a only"),
        (container([KERNEL.format(1, 8)], SASS), "code for sm_100, sm_90 only, not for compute_90"),
        (container([KERNEL.format(1, 8)], SASS[:1] + PTX), "code for compute_90, sm_90 only, not for sm_100"),
        (container([ATTENTION.format(1)], SASS), "not for compute_90"),
        (b"no code", "0 cubins"),
    ],
)
def test_a_kernel_without_code_is_named(
    library: bytes, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "library.so", library, monkeypatch) == 1
    assert problem in capsys.readouterr().err


def test_compressed_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = container([], SASS, payload=b"compressed code")
    assert "compress-mode=none" in str(run(tmp_path / "library.so", library, monkeypatch))
