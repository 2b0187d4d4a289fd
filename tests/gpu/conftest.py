"""Tests of the CUDA library; run by scripts/gpu_check.sh where a GPU is. Without one they fail and are not skipped."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from glint.engine.args import Kernels
from tests.cpu.operations import Operations
from tests.gpu.cases import CaseStore
from tests.gpu.operations_cases import CPU_THREADS, REPEATS
from tests.gpu.operations_cuda import CudaOperations
from tests.gpu.operations_inputs import ErrorRecord


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> CaseStore:
    """Checkpoints with what the exact CPU path and the reference make of them, made when first asked for."""
    return CaseStore(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="session")
def sample_model() -> Path:
    """The folder of the FP8 sample model; a GPU machine may have it without being able to fetch it."""
    from glint.sample.model import make_sample_model

    return make_sample_model()


@pytest.fixture(scope="session")
def cpu() -> Iterator[Operations]:
    """The exact operations of the CPU."""
    with Operations("exact", CPU_THREADS) as operations:
        yield operations


@pytest.fixture(scope="module")
def record(request: pytest.FixtureRequest) -> Iterator[ErrorRecord]:
    """The errors of all tests of a file beside its BOUNDS, printed at the end."""
    errors = ErrorRecord(request.module.BOUNDS)
    yield errors
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n{errors.table()}\n")


@pytest.fixture(scope="module", params=["hopper", "portable"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Hopper and portable kernels."""
    chosen: Kernels = request.param
    return chosen


@pytest.fixture
def portable() -> Iterator[CudaOperations]:
    """The operations that have one kernel for every GPU, each run REPEATS times."""
    with CudaOperations("portable", REPEATS) as operations:
        yield operations
