"""Raw engines on the GPU for tests of schedules: the small models of the CPU tests, and a rank-shaped one."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from glint.checkpoint.table import Checkpoint
from glint.native import abi
from glint.native.library import NativeEngine, load_library
from tests.cpu.small_engine import Answer, Ask, answer_all, open_engine
from tests.cpu.testing_library import load_testing_library
from tests.gpu.forced_ptx import skip_without_ptx

PAGE_TOKENS = 64
CUDA_OPTIONS: dict[str, int] = {"page_tokens": PAGE_TOKENS, "num_pages": 256, "max_context_tokens": 2048}


def open_cuda(checkpoint: Checkpoint, **changes: int) -> NativeEngine:
    """An engine on the GPU with the options of the CPU tests, where they apply."""
    library = load_library(Path(load_testing_library("cuda")._name))
    return open_engine(checkpoint, library, **(CUDA_OPTIONS | changes))


def open_exact(checkpoint: Checkpoint, **changes: int) -> NativeEngine:
    """An engine of the CPU's test build with the exact kernels."""
    library = load_library(Path(load_testing_library("cpu")._name))
    return open_engine(checkpoint, library, kernels=abi.KERNELS_EXACT, num_threads=8, **changes)


class Alone:
    """Answers of one engine that runs each request by itself from a cold cache."""

    def __init__(self, checkpoint: Checkpoint, **changes: Any) -> None:
        self._engine = open_cuda(checkpoint, **changes)
        self._salt = 1
        self._answers: dict[Ask, Answer] = {}

    def __call__(self, ask: Ask) -> Answer:
        """The answer to a request that has the engine for itself and finds nothing cached."""
        if ask not in self._answers:
            self._salt += 1
            (self._answers[ask],) = answer_all(self._engine, [replace(ask, cache_salt=self._salt)])
        return self._answers[ask]


@cache
def kernels_of(name: str) -> int:
    """The number of a kernel set."""
    skip_without_ptx(name)
    return int(getattr(abi, f"KERNELS_{name.upper()}"))
