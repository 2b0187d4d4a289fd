"""Engines of several ranks on random checkpoints, and what one rank answers to the same requests."""

import atexit
import ctypes
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.native import abi
from glint.native.library import NativeEngine, load_library
from tests.cpu.random_asks import mixed_asks, random_prompt
from tests.cpu.small_engine import SMALL_SHAPE, Answer, Ask, answer_all, make_ask, open_engine
from tests.cpu.testing_library import declare, load_testing_library
from tests.reference.checkpoints import Family, Weights, make_checkpoint

RANK_SHAPE: dict[str, Any] = SMALL_SHAPE | {"num_attention_heads": 8, "vocab_size": 264}
GLM47_SHAPE: dict[str, Any] = RANK_SHAPE | {"hidden_size": 128, "n_routed_experts": 160, "num_experts_per_tok": 8}
ROW_SLICES = 8
LAYOUTS = {"tp": abi.EXPERT_LAYOUT_TP, "ep": abi.EXPERT_LAYOUT_EP}
SHARDING = {
    "auto": abi.SEQUENCE_PARALLEL_AUTO,
    "replicated": abi.SEQUENCE_PARALLEL_OFF,
    "sharded": abi.SEQUENCE_PARALLEL_ON,
}
_FOLDER = tempfile.TemporaryDirectory(prefix="glint-ranks-")
_NUMBERS = itertools.count()
atexit.register(_FOLDER.cleanup)


@cache
def rank_model(weights: Weights = "fp8_channel", family: Family = "glm47", **shape: Any) -> Checkpoint:
    """A random checkpoint; the sizes of RANK_SHAPE but where `shape` changes them: 8 heads, 2 KV heads, 264 tokens."""
    folder = Path(_FOLDER.name) / str(next(_NUMBERS))
    return open_checkpoint(make_checkpoint(folder, family, weights, **(RANK_SHAPE | shape)))


def glm47_model(weights: Weights) -> Checkpoint:
    """A random checkpoint of GLM-4.7's form: 160 experts, 8 of them for each token."""
    return rank_model(weights, **GLM47_SHAPE)


def rank_asks(count: int, seed: int) -> list[Ask]:
    """Requests of many lengths, greedy and sampled; the last one also asks for the log-probabilities of its prompt."""
    with_prompt = make_ask(random_prompt(seed, 37), 4, has_prompt_logprobs=1, num_prompt_logprobs=5)
    return [*mixed_asks(count - 1, seed), with_prompt]


def answers_of(checkpoint: Checkpoint, asks: list[Ask], chunk: int = 2048, **changes: int) -> list[Answer]:
    """Answers of a fresh engine on which the requests run together."""
    with open_engine(checkpoint, **changes) as engine:
        return answer_all(engine, asks, chunk)


def open_testing_engine(checkpoint: Checkpoint, **changes: int) -> NativeEngine:
    """An engine of the test library, which has fault places, deferred results and the glint_testing_ functions."""
    return open_engine(checkpoint, load_library(Path(load_testing_library()._name)), **changes)


@contextmanager
def deferring_engine(checkpoint: Checkpoint, **changes: int) -> Iterator[NativeEngine]:
    """An engine of the test library that reads the results of a step only after the next one was launched."""
    defer = declare("glint_testing_defer_results", None, ctypes.c_int32)
    defer(1)
    try:
        with open_testing_engine(checkpoint, **changes) as engine:
            yield engine
    finally:
        defer(0)
