"""Layer by layer: the exact path against the recorded reference and NumPy, each fast path against the exact path.

Errors are relative to what a layer adds to the hidden state. A sum in another order may put a number on the other side
of a rounding to E4M3 or BF16, which moves a row by about a hundredth, so FP8 is held to its median row and to the error
of all rows together.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from glint.engine.args import Kernels
from tests.cpu.case_store import CaseStore, quick_or_slow
from tests.cpu.kernel_sets import FAST_KERNELS, require_kernels
from tests.cpu.tapped_engine import FloatArray, TappedEngine
from tests.reference.checkpoints import Family, Weights
from tests.reference.expected import STATES_PROMPT, read_recorded, recorded_name
from tests.reference.numpy_model import NumpyModel
from tests.reference.recorded_cases import MODEL_CASES, QUICK_CASES

pytestmark = pytest.mark.sanitize

NUM_TOKENS = 192
BF16_ROW_BOUND = 1e-5
FP8_MEDIAN_BOUND = 1e-5
FP8_WHOLE_BOUND = 2e-2
EXACT_WHOLE_BOUND = 1e-5
NUMPY_CASES = [("glm47", "fp8_channel"), ("air", "fp8_tensor"), ("glm47", "fp8_block"), ("tied", "bf16")]
EVERY_CASE = pytest.mark.parametrize(("family", "weights"), quick_or_slow(MODEL_CASES, QUICK_CASES))


@dataclass(frozen=True)
class Case:
    """A checkpoint, tokens, and what the exact path has before each layer and behind the last."""

    folder: Path
    tokens: list[int]
    states: FloatArray


def make_case(folder: Path, *_: str) -> Case:
    """Run the exact path over random tokens."""
    tokens = np.random.default_rng(0).integers(0, 950, NUM_TOKENS).tolist()
    with TappedEngine(folder, "exact") as engine:
        return Case(folder, tokens, engine.hidden_states(tokens))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> CaseStore[Case]:
    """The cases of this module."""
    return CaseStore(tmp_path_factory.mktemp("layers"), make_case)


@dataclass(frozen=True)
class LayerError:
    """Error of one layer relative to what it adds: the median row, the worst row, and all rows together."""

    median: float
    worst: float
    whole: float


def layer_errors(got: FloatArray, states: FloatArray) -> list[LayerError]:
    """Error of each layer's output [layers + 1, len, hidden] given that it worked on the same input."""
    found = []
    for layer in range(len(states) - 1):
        error = row_sizes(got[layer + 1].astype(np.float64) - states[layer + 1])
        added = row_sizes(states[layer + 1].astype(np.float64) - states[layer])
        whole = float(np.linalg.norm(error) / np.linalg.norm(added))
        found.append(LayerError(float(np.median(error / added)), float((error / added).max()), whole))
    return found


def row_sizes(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Length of each row."""
    return np.linalg.norm(rows, axis=1)


@pytest.mark.parametrize("kernels", FAST_KERNELS)
@EVERY_CASE
def test_each_layer_of_a_fast_path(cases: CaseStore[Case], family: Family, weights: Weights, kernels: Kernels) -> None:
    require_kernels(kernels)
    case = cases[family, weights]
    with TappedEngine(case.folder, kernels) as engine:
        got = engine.hidden_states(case.tokens, dict(enumerate(case.states)))
    np.testing.assert_array_equal(got[0], case.states[0])
    assert not np.array_equal(got[1:], case.states[1:])
    errors = layer_errors(got, case.states)
    print(*errors, sep="\n")
    for error in errors:
        if weights == "bf16":
            assert error.worst < BF16_ROW_BOUND
        else:
            assert error.median < FP8_MEDIAN_BOUND
            assert error.whole < FP8_WHOLE_BOUND


@EVERY_CASE
def test_each_layer_of_the_exact_path_is_the_references(
    cases: CaseStore[Case], family: Family, weights: Weights
) -> None:
    """Each layer from what transformers gave to it, as recorded."""
    recorded = read_recorded(recorded_name(family, weights))
    folder, prompt = cases[family, weights].folder, recorded.prompts[STATES_PROMPT]
    recorded.check_folder(folder)
    with TappedEngine(folder, "exact") as engine:
        got = engine.hidden_states(prompt, dict(enumerate(recorded.layer_outputs, 1)))
    errors = layer_errors(got, np.concatenate([got[:1], recorded.layer_outputs]))
    print(*errors, sep="\n")
    assert len(errors) == len(recorded.layer_outputs) >= 4
    assert max(error.whole for error in errors) < EXACT_WHOLE_BOUND


@pytest.mark.parametrize(("family", "weights"), quick_or_slow(MODEL_CASES, NUMPY_CASES))
def test_each_layer_of_the_exact_path_is_numpys(cases: CaseStore[Case], family: Family, weights: Weights) -> None:
    """Embedding and layers over a longer prompt than the recorded one."""
    case = cases[family, weights]
    model = NumpyModel(case.folder)
    np.testing.assert_array_equal(case.states[0], model.embed(case.tokens))
    outputs = [model.layer(rows, index) for index, rows in enumerate(case.states[:-1])]
    errors = layer_errors(np.stack([case.states[0], *outputs]), case.states)
    print(*errors, sep="\n")
    assert max(error.whole for error in errors) < EXACT_WHOLE_BOUND


def test_a_layer_works_on_what_was_put_in(cases: CaseStore[Case]) -> None:
    case = cases["air", "fp8_tensor"]
    with TappedEngine(case.folder, "exact") as engine:
        swapped = engine.hidden_states(case.tokens, {2: case.states[2][::-1]})
        untouched = engine.hidden_states(case.tokens)
    np.testing.assert_array_equal(untouched, case.states)
    np.testing.assert_array_equal(swapped[:3], case.states[:3])
    assert layer_errors(swapped, case.states)[2].median > 0.5
