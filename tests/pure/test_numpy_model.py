"""The NumPy model against the recorded reference: what tests/cpu compares with agrees with itself, without torch."""

from pathlib import Path

import numpy as np
import pytest

from tests.reference.checkpoints import Family, Weights, make_checkpoint
from tests.reference.expected import model_problems, read_recorded, recorded_name
from tests.reference.numpy_model import NumpyModel

CASES: list[tuple[Family, Weights]] = [
    ("glm47", "fp8_channel"),
    ("air", "bf16"),
    ("glm47", "fp8_block"),
    ("tied", "fp8_tensor"),
    ("air", "fp8_group"),
]


@pytest.mark.parametrize(("family", "weights"), CASES)
def test_the_numpy_model_is_the_recorded_reference(tmp_path: Path, family: Family, weights: Weights) -> None:
    recorded = read_recorded(recorded_name(family, weights))
    folder = make_checkpoint(tmp_path, family, weights)
    recorded.check_folder(folder)
    assert model_problems(recorded, NumpyModel(folder)) == []


def test_greedy_takes_the_best_token_of_each_row(tmp_path: Path) -> None:
    recorded = read_recorded(recorded_name("tied", "bf16"))
    tokens, gaps = NumpyModel(make_checkpoint(tmp_path, "tied", "bf16")).greedy(recorded.prompts[1], 3)
    assert tokens == recorded.answers[1].greedy[:3]
    np.testing.assert_allclose(gaps, recorded.answers[1].gaps[:3], rtol=0, atol=1e-5)


def test_a_changed_weight_is_noticed(tmp_path: Path) -> None:
    recorded = read_recorded(recorded_name("tied", "bf16"))
    model = NumpyModel(make_checkpoint(tmp_path, "tied", "bf16"))
    name = "model.layers.3.mlp.experts.2.up_proj.weight"
    model.tensors[name] = -model.tensors[name]
    assert model_problems(recorded, model) != []
