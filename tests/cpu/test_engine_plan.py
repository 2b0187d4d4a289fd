"""What an engine would take, asked before it is made; how far a load is; and what the CPU library refuses."""

import ctypes
from typing import Any

import pytest

from glint.checkpoint.table import Checkpoint
from glint.engine.settings import page_cache_bytes
from glint.native import abi
from glint.native.library import InvalidArgument, Unsupported, choose_library, load_library, load_progress, plan_engine
from tests.cpu.rank_engine import rank_model
from tests.cpu.raw_engine import Handle
from tests.cpu.small_engine import Session, engine_options, make_ask, open_engine, small_model
from tests.reference.shapes import TOKEN_WEIGHTS, Weights

pytestmark = pytest.mark.sanitize


def library() -> ctypes.CDLL:
    return load_library(choose_library("cpu"))


@pytest.mark.parametrize("weights", TOKEN_WEIGHTS)
@pytest.mark.parametrize(
    "changes", [{}, {"num_threads": 3, "row_slices": 2, "max_step_tokens": 33, "max_step_items": 5, "page_tokens": 4}]
)
def test_the_plan_is_what_the_engine_takes(weights: Weights, changes: dict[str, int]) -> None:
    assert_planned(small_model(weights), changes)


@pytest.mark.parametrize("row_slices", [1, 2])
def test_the_plan_has_the_scales_of_groups(row_slices: int) -> None:
    changes = {"row_slices": row_slices, "max_step_tokens": 33}
    shape = {"hidden_size": 320, "intermediate_size": 512, "moe_intermediate_size": 256, "head_dim": 64}
    models = [rank_model(weights, **shape) for weights in ("fp8_block", "fp8_group")]
    tokens, groups = (assert_planned(model, changes) for model in models)
    assert groups.workspace_bytes > tokens.workspace_bytes


@pytest.mark.parametrize("changes", [{}, {"num_ranks": 2, "row_slices": 2, "num_threads": 2}])
def test_the_plan_has_the_hidden_rows_of_the_pages(changes: dict[str, int]) -> None:
    model = rank_model(mtp="with copies")
    plan = assert_planned(model, changes | {"max_draft_tokens": 2})
    page_tokens = engine_options(model).page_tokens
    assert plan.bytes_per_page == page_cache_bytes(model.config, "cpu", page_tokens, changes.get("num_ranks", 1), True)


def assert_planned(checkpoint: Checkpoint, changes: dict[str, int]) -> abi.EnginePlan:
    """Hold what an engine takes to its plan."""
    plan = plan_engine(library(), engine_options(checkpoint, num_pages=0, **changes))
    with open_engine(checkpoint, num_pages=7, **changes) as engine:
        stats = engine.stats()
    assert (plan.kernels, plan.workspace_bytes) == (stats.kernels, stats.workspace_bytes)
    assert plan.bytes_per_page * 7 == stats.page_bytes
    assert (plan.weight_bytes, plan.pinned_bytes, stats.weight_bytes_placed, stats.steps_replayed) == (0, 0, 0, 0)
    return plan


def test_the_plan_names_the_processor_and_its_memory() -> None:
    plan = plan_engine(library(), engine_options(small_model()))
    assert plan.struct_bytes == ctypes.sizeof(abi.EnginePlan)
    assert 0 < len(plan.device_name) < 64
    assert 0 < plan.memory_free <= plan.memory_total


@pytest.mark.parametrize(
    ("name", "value"), [("page_tokens", 3), ("max_step_tokens", 0), ("kernels", 11), ("num_pages", 2**26 + 1)]
)
def test_the_plan_of_bad_options_is_refused(name: str, value: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"options\.{name} is {value}"):
        plan_engine(library(), engine_options(small_model(), **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"), [("kernels", abi.KERNELS_HOPPER), ("local_experts", 4), ("synthetic_seed", 1)]
)
def test_the_plan_of_what_a_processor_cannot_do_is_refused(name: str, value: int) -> None:
    with pytest.raises(Unsupported, match=rf"{name}.* {value}.*; use "):
        plan_engine(library(), engine_options(small_model(), **{name: value}))


def test_all_experts_may_be_named() -> None:
    checkpoint = small_model()
    with open_engine(checkpoint, local_experts=checkpoint.config.num_experts) as engine:
        assert engine.stats().experts_read == 0


def test_random_weights_are_refused() -> None:
    options = engine_options(small_model(), synthetic_seed=5)
    options.file_count = 0
    handle = Handle()
    assert library().glint_init_engine(options, None, 0, handle) == abi.STATUS_UNSUPPORTED
    assert b"the CUDA library" in library().glint_last_error() and not handle


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        ("glint_plan_engine", (None, abi.sized(abi.EnginePlan)), "options is null"),
        ("glint_plan_engine", (abi.EngineOptions(), abi.sized(abi.EnginePlan)), "options.struct_bytes is 0"),
        ("glint_plan_engine", (engine_options(small_model()), None), "plan is null"),
        ("glint_plan_engine", (engine_options(small_model()), abi.EnginePlan()), "plan.struct_bytes is 0"),
        ("glint_load_progress", (None,), "state is null"),
        ("glint_load_progress", (abi.LoadState(),), "state.struct_bytes is 0"),
    ],
)
def test_a_place_that_is_none_is_refused(function: str, arguments: tuple[Any, ...], words: str) -> None:
    assert getattr(library(), function)(*arguments) == abi.STATUS_INVALID_ARGUMENT
    assert words in library().glint_last_error().decode()


def test_the_load_is_over_once_the_engine_is_there() -> None:
    checkpoint = small_model()
    with open_engine(checkpoint):
        state = load_progress(library())
    assert state.is_loading == 0
    assert 0 < state.bytes_done <= state.bytes_total == sum(tensor.byte_count for tensor in checkpoint.tensors)


def test_different_experts_are_counted_once_per_layer_and_step() -> None:
    checkpoint = small_model()
    config = checkpoint.config
    layers = config.num_layers - config.num_dense_layers
    with open_engine(checkpoint) as engine:
        session = Session(engine)
        session.add(make_ask((7,), 1))
        session.run()
        assert engine.stats().experts_read == layers * config.experts_per_token
        session.add(make_ask(range(40, 240), 1))
        session.run()
        assert engine.stats().experts_read <= layers * (config.experts_per_token + config.num_experts)
        assert engine.stats().experts_read > 2 * layers * config.experts_per_token
