"""The self-test of `glint check --gpu` with the plain kernels of the CPU in the GPU's place, right and wrong."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from glint.checkpoint.quantisation import ScaleKind
from glint.checkpoint.table import Checkpoint
from glint.engine.args import EngineArgs
from glint.errors import EngineError
from glint.gpu import self_test
from glint.gpu.random_model import normal_e4m3
from glint.gpu.self_test import MODELS, SMALL, CheckedModel, Libraries, Row
from glint.native.library import NativeEngine, open_library
from tests.reference.numpy_ops import decode_e4m3

TINY = replace(
    SMALL,
    vocab_size=256,
    mtp_vocab_size=256,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rotary_dim=16,
    dense_width=96,
    expert_width=32,
    shared_width=32,
)
LENGTHS = (40, 9, 1)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few requests, which a processor computes in no time."""
    monkeypatch.setattr(self_test, "NUM_SHORT_PROMPTS", 3)
    monkeypatch.setattr(self_test, "BATCHES", (2, 5, 7))
    monkeypatch.setattr(self_test, "CHUNKS", (7,))


def run(*models: CheckedModel) -> list[Row]:
    """The rows of the self-test of the plain kernels."""
    library = open_library("cpu")
    return [*self_test.run_self_test(Libraries(library, "cpu", "plain", library), lambda _: None, models)]


def break_tested(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let the engine under test compute another model."""
    right = self_test.open_engine

    def open_wrong(library: Any, checkpoint: Checkpoint, args: EngineArgs) -> NativeEngine:
        if args.kernels == "plain":
            checkpoint = replace(checkpoint, config=replace(checkpoint.config, **changes))
        return right(library, checkpoint, args)

    monkeypatch.setattr(self_test, "open_engine", open_wrong)


@pytest.mark.parametrize(
    "model",
    [
        CheckedModel("channel", TINY, LENGTHS, has_sampling=True),
        CheckedModel("tile", replace(TINY, weight_scale_kind=ScaleKind.TILE), LENGTHS),
        CheckedModel("tensor", replace(TINY, weight_scale_kind=ScaleKind.TENSOR), LENGTHS),
        CheckedModel("bf16", replace(TINY, weight_scale_kind=ScaleKind.NONE, scale_suffix=None), LENGTHS),
        CheckedModel("two layers", replace(TINY, num_layers=2, num_dense_layers=1), LENGTHS),
        CheckedModel("ranks", TINY, LENGTHS, tp=2),
    ],
    ids=lambda model: model.name,
)
def test_kernels_that_agree_pass(model: CheckedModel) -> None:
    rows = run(model)
    assert all(row.has_passed for row in rows), rows
    assert len(rows) == 5 + 1 + 3 + model.has_sampling
    assert {row.model for row in rows} == {f"{model.name}, BF16 pages"}


@pytest.mark.parametrize(
    "changes",
    [{"routed_scaling": 1.0}, {"rope_theta": 100.0}, {"normalise_weights": False}, {"experts_per_token": 6}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_wrong_layer_fails_prefill_and_decode(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    break_tested(monkeypatch, **changes)
    rows = run(CheckedModel("wrong", TINY, LENGTHS))
    failed = {row.check for row in rows if not row.has_passed}
    assert {f"{part}, error of log-probabilities, median" for part in ("prefill", "decode")} <= failed, rows
    assert not any("alone" in check or "chunks" in check for check in failed)


def test_an_answer_that_depends_on_the_batch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = self_test.answer_all

    def answer(engine: NativeEngine, prompts: Any, **options: Any) -> list[self_test.Answer]:
        answers = right(engine, prompts, **options)
        if len(prompts) == 5:
            position, entry = next(iter(answers[3].logprobs.items()))
            token, value = next(iter(entry.items()))
            entry[token] = float(np.nextafter(np.float32(value), np.float32(0)))
            assert answers[3].logprobs[position][token] != value
        return answers

    monkeypatch.setattr(self_test, "answer_all", answer)
    failed = [row for row in run(CheckedModel("batch", TINY, LENGTHS)) if not row.has_passed]
    assert [(row.check, row.value) for row in failed] == [("decode, batch of 5 as alone", "4 of 5")]


def test_an_engine_that_fails_is_a_failed_row_and_the_next_model_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = self_test.check_model

    def check(libraries: Any, model: CheckedModel, *rest: Any) -> Any:
        if model.name == "first":
            raise EngineError("an illegal memory access was encountered")
        return right(libraries, model, *rest)

    monkeypatch.setattr(self_test, "check_model", check)
    rows = run(CheckedModel("first", TINY, LENGTHS), CheckedModel("second", TINY, LENGTHS))
    assert rows[0] == Row("first", "runs", "an illegal memory access was encountered", "", False)
    assert len(rows) > 5 and all(row.has_passed for row in rows[1:])


def test_positions_that_share_no_token_or_no_number_are_infinitely_far() -> None:
    assert self_test.position_error({1: -1.0, 2: -2.0}, {2: -2.5, 1: -1.1}) == pytest.approx(0.5)
    assert self_test.position_error({1: -1.0}, {2: -1.0}) == np.inf
    assert self_test.position_error({1: float("nan"), 2: -1.0}, {1: -1.0, 2: -1.0}) == np.inf


def test_random_e4m3_values_are_normal() -> None:
    codes = normal_e4m3(np.random.default_rng(0))
    exact = np.random.default_rng(0).standard_normal(256) * 16
    np.testing.assert_allclose(decode_e4m3(codes), exact, rtol=1 / 16)


def test_every_family_and_kind_of_weight_is_tested() -> None:
    assert {model.config.weight_scale_kind for model in MODELS} == set(ScaleKind)
    assert {model.config.hidden_size for model in MODELS} >= {5120, 4096}
    assert {model.config.has_qk_norm for model in MODELS} == {True, False}
    assert max(max(model.prompt_lengths) for model in MODELS) > 1024
