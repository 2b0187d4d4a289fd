"""What an engine would take before it is made, how far its weights are read, and how the rank bench times steps."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from glint.bench.rank import RankBench
from glint.bench.synthetic import synthetic_checkpoint
from glint.engine.args import EngineArgs
from glint.engine.engine import Engine
from glint.engine.memory_plan import plan_gpu
from glint.engine.native_options import native_options
from glint.engine.settings import EngineSettings, read_free_memory, token_cache_bytes
from glint.errors import EngineError
from glint.native import abi
from glint.native.library import Unsupported, choose_library, load_library, load_progress, plan_engine
from tests.cpu.small_engine import VOCAB_SIZE, engine_options, open_engine, small_model
from tests.cpu.whole_engine import make_engine

SHAPE = small_model().config


def settings(**options: int) -> EngineSettings:
    """Settings of an engine on the small model."""
    sizes = {"page_tokens": 16, "num_pages": 64, "threads": 1, "max_model_len": 512} | options
    return EngineSettings.resolve("small", SHAPE, EngineArgs(**sizes))


def test_a_plan_says_what_the_engine_then_takes() -> None:
    library = load_library(choose_library("cpu"))
    options = engine_options(small_model())
    plan = plan_engine(library, options)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < plan.memory_free <= plan.memory_total <= machine
    assert plan.bytes_per_page == options.page_tokens * token_cache_bytes(SHAPE, "cpu")
    assert plan.device_name and plan.kernels != abi.KERNELS_AUTO
    with open_engine(library=library) as engine:
        stats = engine.stats()
        assert stats.page_bytes == options.num_pages * plan.bytes_per_page
        assert stats.kernels == plan.kernels


def test_a_plan_does_not_depend_on_the_pages() -> None:
    library = load_library(choose_library("cpu"))
    one, many = (
        plan_gpu(library, chosen, native_options(chosen, SHAPE, ()), 0.9)
        for chosen in (settings(), settings(num_pages=512))
    )
    close = {"memory_free": one.memory_free, "max_requests": one.max_requests}
    assert replace(many, **close) == one
    assert abs(many.memory_free - read_free_memory()) < 2**30


def test_options_that_cannot_be_are_refused_by_a_plan() -> None:
    options = engine_options(small_model(), max_step_tokens=0)
    with pytest.raises(EngineError, match="max_step_tokens"):
        plan_engine(load_library(choose_library("cpu")), options)


def test_the_progress_ends_with_the_weights() -> None:
    library = load_library(choose_library("cpu"))
    with open_engine(library=library):
        state = load_progress(library)
    assert not state.is_loading
    assert state.bytes_total == sum(entry.byte_count for entry in small_model().tensors)
    assert 0.9 * state.bytes_total <= state.bytes_done <= state.bytes_total


def test_an_engine_says_how_long_its_weights_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glint.engine.loading.SHOWN_AFTER_SECONDS", 0.0)
    said: list[str] = []
    with make_engine(say=said.append):
        pass
    (line,) = said
    assert line.startswith("weights 0.0 GB in ") and line.endswith(" GB/s)")


def test_synthetic_weights_are_not_for_the_cpu() -> None:
    options = native_options(settings(), SHAPE, ())
    options.synthetic_seed = 1
    with pytest.raises(Unsupported, match="synthetic"):
        plan_engine(load_library(choose_library("cpu")), options)


def test_an_engine_asks_for_the_random_weights_of_its_checkpoint() -> None:
    with pytest.raises(Unsupported, match="synthetic_seed is 1: the CPU library"):
        Engine(synthetic_checkpoint(SHAPE, Path("small")), settings(), None)


def test_the_rank_bench_runs_a_load_to_its_end() -> None:
    with open_engine(max_step_tokens=48, max_step_items=5) as engine:
        bench = RankBench(engine, VOCAB_SIZE, 48)
        load = bench.measure_load(5, 20, 9)
        short = bench.measure_load(2, 20, 1)
        stats = engine.stats()
        engine.check()
    assert (load.decode_steps, short.decode_steps, short.decode_ms) == (8, 0, None)
    assert load.prefill_seconds > 0 and load.decode_ms is not None and load.decode_ms > 0
    assert stats.pages_held == 0


def test_the_rank_bench_times_every_step_and_leaves_nothing_behind() -> None:
    with open_engine(max_step_tokens=48, max_step_items=5) as engine:
        bench = RankBench(engine, VOCAB_SIZE, 48)
        row = bench.measure_decode(5, 100, warm_up=3, steps=7, num_moe_layers=2)
        prefill = bench.measure_prefill(40, 60)
        stats = engine.stats()
        engine.check()
    assert 0 < row.p10_ms <= row.median_ms <= row.p90_ms and prefill.median_ms > 0
    assert 2 <= row.experts_per_layer <= 8
    assert (row.batch, row.context, row.steps_timed, row.mean_context) == (5, 100, 7, 108.0)
    assert (stats.num_requests, stats.pages_held, stats.steps_in_flight) == (0, 0, 0)
    decode_tokens, prefill_tokens = 5 * (100 + 3 + 8), 6 * (40 + 60)
    assert stats.tokens_computed == decode_tokens + prefill_tokens


def test_the_rank_bench_refuses_steps_that_bring_too_few_tokens() -> None:
    with open_engine(max_step_items=2) as engine:
        bench = RankBench(engine, VOCAB_SIZE, 64)
        request = bench._add(30, 2)
        bench._fill([request], 30)
        with pytest.raises(EngineError, match="brought 0 tokens"):
            bench._decode([request], 2)
