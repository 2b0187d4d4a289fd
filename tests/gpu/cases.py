"""Checkpoints for the GPU tests, and what the exact CPU path and the reference compute on them.

Besides the small families of the CPU tests there are `rank` and `rank_air`: models with the matrix shapes of one of
eight ranks of GLM-4.7 (hidden 5120, 12 heads on one KV head, experts of width 192) and of GLM-4.5-Air (hidden 4096,
experts of width 176, no norms of query and key), few layers and experts, on which the tiled kernels run. `rank_air_kv`
has three KV heads instead.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from glint.checkpoint.table import open_checkpoint
from glint.engine.args import Kernels
from tests.cpu.parity import Rows, answer_rows
from tests.cpu.tapped_engine import Answer, FloatArray, TappedEngine
from tests.reference.checkpoints import FAMILIES, Family, Weights, make_checkpoint, make_prompts
from tests.reference.shapes import TOKEN_WEIGHTS
from tests.reference.transformers_reference import Reference

Shape = Literal["glm47", "air", "tied", "rank", "rank_air", "rank_air_kv"]
Key = tuple[Shape, Weights]

NUM_TOKENS = 192
ANSWER_TOKENS = 32
NUM_SEQUENCES = 5
SEQUENCE_TOKENS = 128
CPU_THREADS = 8
TIE_BREAK = 1 / 64
CUDA_KERNELS: tuple[Kernels, ...] = ("portable", "hopper")
RANK_SHAPE: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 1536,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "n_routed_experts": 24,
    "vocab_size": 1003,
}
AIR_RANK_SHAPE = RANK_SHAPE | {
    "hidden_size": 4096,
    "intermediate_size": 1368,
    "moe_intermediate_size": 176,
    "num_experts_per_tok": 8,
}
FAMILY_AND_CHANGES: dict[Shape, tuple[Family, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "rank": ("glm47", RANK_SHAPE),
    "rank_air": ("air", AIR_RANK_SHAPE),
    "rank_air_kv": ("air", AIR_RANK_SHAPE | {"num_key_value_heads": 3}),
}
SMALL_KEYS: list[Key] = [(family, weights) for family in FAMILIES for weights in TOKEN_WEIGHTS]
RANK_KEYS: list[Key] = [("rank", "fp8_channel"), ("rank", "fp8_tensor"), ("rank", "bf16"), ("rank_air", "fp8_channel")]
BF16_KEYS: list[Key] = [key for key in SMALL_KEYS + RANK_KEYS if key[1] == "bf16"]
FP8_KEYS: list[Key] = [key for key in SMALL_KEYS + RANK_KEYS if key[1] != "bf16"]


@dataclass(frozen=True)
class Case:
    """A checkpoint folder with tokens to run over it."""

    folder: Path
    vocab_size: int

    @property
    def tokens(self) -> list[int]:
        """Random tokens of one prompt."""
        tokens: list[int] = np.random.default_rng(0).integers(0, 950, NUM_TOKENS).tolist()
        return tokens

    @property
    def sequences(self) -> list[list[int]]:
        """Random token sequences, over 500 positions together."""
        rows: list[list[int]] = np.random.default_rng(0).integers(0, 950, (NUM_SEQUENCES, SEQUENCE_TOKENS)).tolist()
        return rows

    @property
    def prompts(self) -> list[list[int]]:
        """Five prompts of different lengths."""
        return make_prompts(self.vocab_size)


class CaseStore:
    """Makes checkpoints and what is expected on them when they are first asked for, and keeps it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._cases: dict[Key, Case] = {}
        self._references: dict[Key, Reference] = {}
        self._states: dict[Key, FloatArray] = {}
        self._logits: dict[Key, NDArray[np.float32]] = {}
        self._between_orders: dict[Key, float] = {}
        self._rows: dict[tuple[Key, tuple[int, ...]], Rows] = {}

    def case(self, key: Key) -> Case:
        """The checkpoint of a shape and a kind of weights."""
        if key not in self._cases:
            shape, weights = key
            family, changes = FAMILY_AND_CHANGES[shape]
            folder = make_checkpoint(self._root / "-".join(key), family, weights, **changes)
            self._cases[key] = Case(folder, open_checkpoint(folder).config.vocab_size)
        return self._cases[key]

    def reference(self, key: Key) -> Reference:
        """The reference with the rounding points of CUDA."""
        if key not in self._references:
            self._references[key] = Reference(self.case(key).folder, rounds_like="cuda")
        return self._references[key]

    def states(self, key: Key) -> FloatArray:
        """Hidden states before each layer and behind the last, [layers + 1, tokens, hidden].

        Those of the exact CPU path from rows without ties for FP8, where both backends round alike, and of the
        reference for BF16.
        """
        if key not in self._states:
            case = self.case(key)
            if key[1] == "bf16":
                self._states[key] = self.reference(key).hidden_states(case.tokens)
            else:
                with TappedEngine(case.folder, "exact", CPU_THREADS) as engine:
                    rows = without_ties(engine.hidden_states(case.tokens)[0])
                    states = engine.hidden_states(case.tokens, {0: rows})
                states[0] = rows
                self._states[key] = states
        return self._states[key]

    def exact_logits(self, key: Key) -> NDArray[np.float32]:
        """Logits of the exact path over all sequences, [positions, vocab]."""
        if key not in self._logits:
            case = self.case(key)
            with TappedEngine(case.folder, "exact", CPU_THREADS) as engine:
                self._logits[key] = logits_over(engine, case.sequences)
        return self._logits[key]

    def between_orders(self, key: Key) -> float:
        """Mean KL over all sequences between orders of float32 sums of the reference."""
        if key not in self._between_orders:
            self._between_orders[key] = self.reference(key).kl_between_orders(*self.case(key).sequences)
        return self._between_orders[key]

    def rows_along(self, key: Key, answer: Answer) -> Rows:
        """The reference's logits before each token of an answer, [tokens, vocab]."""
        place = key, (*answer.prompt, *answer.tokens)
        if place not in self._rows:
            self._rows[place] = answer_rows(self.reference(key), answer)
        return self._rows[place]


def without_ties(rows: FloatArray) -> FloatArray:
    """Rows up to TIE_BREAK larger, of which no number lies exactly between two E4M3 values.

    Embedding rows and norm weights are BF16 and the norm's factor cancels in E4M3(x / a), so that of embedding
    rows some do, and the last bit of the norm decides between the two.
    """
    factors = 1 + np.random.default_rng(7).random(rows.shape) * TIE_BREAK
    return (rows * factors).astype(np.float32)


def cuda_engine(folder: Path, kernels: Kernels) -> TappedEngine:
    """The model on the GPU."""
    return TappedEngine(folder, kernels, device="cuda")


def logits_over(engine: TappedEngine, sequences: list[list[int]]) -> NDArray[np.float32]:
    """Logits [positions, vocab] of all positions of all sequences."""
    return np.concatenate([engine.logits(sequence) for sequence in sequences])
