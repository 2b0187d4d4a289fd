"""`glint bench kernels`: times every CUDA operation at the shapes of a rank, through the test build of the library."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from glint.errors import EngineError, RequestError

LIBRARY = "libglint_cuda_test.so"
MODULE = "tests.gpu.kernel_times"


def run(chosen: argparse.Namespace) -> int:
    """Runs the measurements of the checkout with their output as it comes; the exit code is 1 where they failed."""
    if chosen.device != "cuda":
        raise RequestError("--device cpu has no bench of single kernels: 'glint bench cpu' measures the CPU engine")
    root = Path(__file__).resolve().parents[2]
    module = root / (MODULE.replace(".", "/") + ".py")
    if not module.is_file():
        raise EngineError(f"{module} is not there; run 'glint bench kernels' from a checkout of the repository")
    library = (root / "build" if chosen.build_dir is None else chosen.build_dir) / LIBRARY
    if not library.is_file():
        raise EngineError(
            f"{library} is not there; build it with scripts/build.sh --cuda --tests, or name the folder that has it "
            "with --build-dir"
        )
    environment = os.environ | {"GLINT_CUDA_TEST_LIBRARY": str(library.resolve())}
    ended = subprocess.run([sys.executable, "-m", MODULE], cwd=root, env=environment, check=False)
    return 0 if ended.returncode == 0 else 1
