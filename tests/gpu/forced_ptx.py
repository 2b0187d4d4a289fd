"""Runs with CUDA_FORCE_PTX_JIT=1, as on a GPU that the library has no machine code for (scripts/gpu_check.sh ptx)."""

import os

import pytest

IS_FORCED = os.environ.get("CUDA_FORCE_PTX_JIT", "0") not in ("", "0")


def skip_without_ptx(kernels: str) -> None:
    """Skip a test of kernels that have no PTX: wgmma is compiled for sm_90a alone."""
    if IS_FORCED and kernels == "hopper":
        pytest.skip("CUDA_FORCE_PTX_JIT: the Hopper kernels have no PTX")
