"""Tests of the CUDA library; run by scripts/gpu_check.sh where a GPU is. Without one they fail and are not skipped."""

from pathlib import Path

import pytest

from tests.gpu.cases import CaseStore


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> CaseStore:
    """Checkpoints with what the exact CPU path and the reference make of them, made when first asked for."""
    return CaseStore(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="session")
def sample_model() -> Path:
    """The folder of the FP8 sample model; a GPU machine may have it without being able to fetch it."""
    from glint.sample.model import make_sample_model

    return make_sample_model()
