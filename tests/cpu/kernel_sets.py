"""The kernel sets of this machine, to run tests with each of them."""

import platform

import pytest

from tests.cpu.operations import Operations

IS_ARM = platform.machine() in ("aarch64", "arm64")
FAST_KERNELS = ("plain", "neon", "neon_bf16") if IS_ARM else ("plain", "avx2", "avx512", "avx512_bf16", "amx")
KERNELS = ("exact", *FAST_KERNELS)
_RUNS_ANYWHERE = ("exact", "plain", "neon")
_ALL_KERNELS = ("exact", "plain", "neon", "neon_bf16", "avx2", "avx512", "avx512_bf16", "amx")


def open_operations(kernels: str, threads: int) -> Operations:
    """Open a kernel set, or skip the test where the processor lacks its instructions.

    The sets that every processor of the architecture runs are never skipped.
    """
    try:
        return Operations(kernels, threads)
    except LookupError as refusal:
        if kernels in _RUNS_ANYWHERE:
            raise
        pytest.skip(f"{kernels}: {refusal}")


def require_kernels(kernels: str) -> None:
    """Skip the test where the kernel set does not run here."""
    with open_operations(kernels, 1) as opened:
        assert opened.kernels == kernels


def runs_here(kernels: str) -> bool:
    """Whether the library has the kernel set and the processor its instructions."""
    try:
        with Operations(kernels, 1):
            return True
    except LookupError:
        return False


def main() -> None:
    """Print which kernel sets tests/cpu runs on this machine and which only scripts/instruction_sets.sh does."""
    found = [kernels for kernels in _ALL_KERNELS if runs_here(kernels)]
    missing = [kernels for kernels in _ALL_KERNELS if kernels not in found]
    print(f"kernel sets run by tests/cpu: {', '.join(found)}")
    if missing:
        print(f"not on this processor, run by scripts/instruction_sets.sh alone: {', '.join(missing)}")


if __name__ == "__main__":
    main()
