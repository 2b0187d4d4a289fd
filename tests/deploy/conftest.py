"""Where the programs of deploy/ are, and the Modal app as its tests load it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MODAL_MODULES = ("modal_app", "modal_steps", "modal_weights")


@pytest.fixture(scope="session")
def modal_app(sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """deploy/modal_app.py set up for the sample model and no GPU, with a folder of models that holds it."""
    models = tmp_path_factory.mktemp("models")
    (models / "sample" / "models").mkdir(parents=True)
    (models / "sample" / "models" / sample_model.name).symlink_to(sample_model)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DEPLOY))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("GLINT_MODEL_ID", "sample")
        patch.setenv("GLINT_GPU", "none")
        patch.setenv("GLINT_SERVE_FLAGS", "--threads 2")
        module = importlib.import_module("modal_app")
        patch.setattr(module, "MODELS", models)
        yield module
    for name in MODAL_MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def modal_steps(modal_app: ModuleType) -> ModuleType:
    """deploy/modal_steps.py."""
    return sys.modules["modal_steps"]


@pytest.fixture(scope="session")
def modal_weights(modal_app: ModuleType) -> ModuleType:
    """deploy/modal_weights.py."""
    return sys.modules["modal_weights"]
