"""The MTP layer: what is loaded of it, and its draft logits against NumPy, from the same hidden states.

Bounds and what was seen are those of logits of about 3: the exact path differs from NumPy by float32 rounding alone.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from glint.checkpoint.table import open_checkpoint
from glint.errors import EngineError
from glint.native import abi
from glint.native.library import NativeEngine, choose_library, load_library, plan_engine
from tests.cpu.drafting_engine import DraftingEngine
from tests.cpu.kernel_sets import FAST_KERNELS, require_kernels
from tests.cpu.rank_engine import open_testing_engine
from tests.cpu.small_engine import (
    DEFAULT_OPTIONS,
    SMALL_SHAPE,
    engine_options,
    open_engine,
    small_model,
)
from tests.reference.checkpoints import WEIGHTS, Family, Mtp, Weights, make_checkpoint
from tests.reference.numpy_model import NumpyModel
from tests.reference.numpy_ops import FloatArray

pytestmark = pytest.mark.sanitize

EXACT_BOUND = 1e-4
NUM_TOKENS = 21
NUM_FED_BACK = 3
PAGE_TOKENS = DEFAULT_OPTIONS["page_tokens"]
CASES: list[tuple[Family, Weights, Mtp]] = [
    ("glm47", "bf16", "without copies"),
    ("glm47", "fp8_channel", "with copies"),
    ("air", "fp8_channel", "with its own"),
    ("air", "fp8_tensor", "with its own"),
    ("glm47", "fp8_block", "with its own"),
    ("glm47", "fp8_group", "with its own"),
    ("tied", "bf16", "with its own"),
    ("tied", "bf16", "with copies"),
]


Mistake = Callable[[NumpyModel, FloatArray], FloatArray]


def normed_states(model: NumpyModel, hidden: FloatArray) -> FloatArray:
    """What the MTP layer is to be given for the output of the last layer."""
    return model.norm(hidden, "model.norm")


def compare(folder: Path, kernels: int, first_position: int = 1, states_of: Mistake = normed_states) -> float:
    """How far draft logits over a random prompt, three drafts fed back, are from NumPy's from the same states."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    tokens: list[int] = np.random.default_rng(1).integers(0, config.vocab_size, NUM_TOKENS + NUM_FED_BACK).tolist()
    model = NumpyModel(folder)
    with open_testing_engine(checkpoint, max_draft_tokens=1, kernels=kernels) as engine:
        drafting = DraftingEngine(engine, config, PAGE_TOKENS)
        hidden = drafting.run_prompt(tokens[:NUM_TOKENS])
        drafting.poison_pages()
        with_hidden = NUM_TOKENS - first_position
        got = drafting.draft_logits(tokens[first_position:], with_hidden, first_position)
    states = states_of(model, hidden)[first_position - 1 : -1]
    expected = model.draft_logits(tokens[first_position:], states, first_position)
    assert np.array_equal(np.isneginf(got), np.isneginf(expected))
    is_drafted = np.isfinite(expected)
    return float(np.abs(got[is_drafted] - expected[is_drafted]).max())


def make_folder(folder: Path, family: Family, weights: Weights, mtp: Mtp, **shape: int) -> Path:
    """A checkpoint of few layers with an MTP layer."""
    return make_checkpoint(folder, family, weights, mtp=mtp, num_hidden_layers=2, first_k_dense_replace=1, **shape)


@pytest.mark.parametrize(("family", "weights", "mtp"), CASES)
def test_draft_logits_are_those_of_numpy(tmp_path: Path, family: Family, weights: Weights, mtp: Mtp) -> None:
    assert compare(make_folder(tmp_path, family, weights, mtp), abi.KERNELS_EXACT) < EXACT_BOUND


@pytest.mark.parametrize(("family", "weights", "mtp"), CASES)
def test_logits_beyond_the_draft_vocabulary_are_no_logits(
    tmp_path: Path, family: Family, weights: Weights, mtp: Mtp
) -> None:
    folder = make_folder(tmp_path, family, weights, mtp, mtp_vocab_size=317)
    assert compare(folder, abi.KERNELS_EXACT) < EXACT_BOUND


@pytest.mark.parametrize("first_position", [2, PAGE_TOKENS, PAGE_TOKENS + 3])
@pytest.mark.parametrize("kernels", ["exact", *FAST_KERNELS])
def test_the_layer_may_begin_anywhere_and_sees_nothing_before(
    tmp_path: Path, kernels: str, first_position: int
) -> None:
    require_kernels(kernels)
    folder = make_folder(tmp_path, "glm47", "bf16", "without copies")
    assert compare(folder, getattr(abi, f"KERNELS_{kernels.upper()}"), first_position) < EXACT_BOUND


def swap_halves(model: NumpyModel, hidden: FloatArray) -> FloatArray:
    """The hidden state before the embedding."""
    name = f"model.layers.{model.num_layers}.eh_proj.weight"
    model.tensors[name] = np.concatenate(np.split(model.tensors[name], 2, axis=1)[::-1], axis=1)
    return normed_states(model, hidden)


def swap_norms(model: NumpyModel, hidden: FloatArray) -> FloatArray:
    """Each input behind the norm of the other."""
    names = [f"model.layers.{model.num_layers}.{name}.weight" for name in ("enorm", "hnorm")]
    model.tensors |= dict(zip(names, [model.tensors[name] for name in reversed(names)], strict=True))
    return normed_states(model, hidden)


def skip_final_norm(model: NumpyModel, hidden: FloatArray) -> FloatArray:
    """The hidden state before the final norm."""
    return hidden


def shift_states(model: NumpyModel, hidden: FloatArray) -> FloatArray:
    """Each token with the hidden state of itself, not of the token before."""
    return np.roll(normed_states(model, hidden), -1, axis=0)


def feed_back_unnormed(model: NumpyModel, hidden: FloatArray) -> FloatArray:
    """What is fed back lacks the weights of the norm; the head has them."""
    prefix = f"model.layers.{model.num_layers}"
    scale = model.tensors[f"{prefix}.shared_head.norm.weight"]
    model.tensors[f"{prefix}.shared_head.norm.weight"] = np.ones_like(scale)
    model.tensors[f"{prefix}.shared_head.head.weight"] = model.tensors["lm_head.weight"] * scale
    return normed_states(model, hidden)


@pytest.mark.parametrize("mistake", [swap_halves, swap_norms, skip_final_norm, shift_states, feed_back_unnormed])
def test_mistakes_would_show(tmp_path: Path, mistake: Mistake) -> None:
    folder = make_folder(tmp_path, "air", "bf16", "without copies")
    assert compare(folder, abi.KERNELS_EXACT, states_of=mistake) > 0.1


@pytest.mark.parametrize("weights", WEIGHTS)
def test_copies_that_equal_the_main_ones_take_no_memory(weights: Weights) -> None:
    mapped: dict[Mtp, int] = {}
    kinds: tuple[Mtp, ...] = ("without copies", "with copies", "with its own")
    for mtp in kinds:
        with open_engine(small_model(weights, mtp), max_draft_tokens=1) as engine:
            mapped[mtp] = engine.stats().weight_bytes_mapped
    assert mapped["without copies"] == mapped["with copies"]
    matrix = SMALL_SHAPE["vocab_size"] * SMALL_SHAPE["hidden_size"]
    assert mapped["with its own"] - mapped["with copies"] >= (4 if weights == "bf16" else 3) * matrix


def test_the_layer_is_one_more_layer_of_every_page() -> None:
    library = load_library(choose_library("cpu"))
    checkpoint = small_model("fp8_channel", "with copies")
    without, with_mtp = (plan_engine(library, engine_options(checkpoint, max_draft_tokens=n)) for n in (0, 3))
    layers = checkpoint.config.num_layers
    state_bytes = 4 * checkpoint.config.hidden_size
    assert (with_mtp.bytes_per_page - state_bytes) * layers == without.bytes_per_page * (layers + 1)
    assert with_mtp.workspace_bytes > without.workspace_bytes


def test_drafting_needs_the_layer() -> None:
    with pytest.raises(EngineError, match="the tensor table lacks role 4, part 0, layer 3"):
        open_engine(small_model(), max_draft_tokens=1)
    with pytest.raises(EngineError, match=f"max_draft_tokens is 9, expected 0 to {abi.MAX_DRAFT_TOKENS}"):
        open_engine(small_model("fp8_channel", "with copies"), max_draft_tokens=9)
    with pytest.raises(EngineError, match="have no place in the model"):
        checkpoint = small_model("fp8_channel", "with copies")
        library = load_library(choose_library("cpu"))
        NativeEngine(library, engine_options(checkpoint), checkpoint.tensor_array(has_mtp=True))
