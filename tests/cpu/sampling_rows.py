"""Rows to sample from, natively and in NumPy."""

import math
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_uint32, c_uint64, sizeof
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from glint.native import abi
from tests.cpu.testing_library import declare
from tests.reference.recorded_cases import KEPT_PENALTY, KEPT_VOCAB_SIZE

MAX_TOP = 20
SETTINGS_THAT_CUT = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 300},
    {"top_k": 10**6},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 50, "min_p": 0.05},
    {"top_p": 0.7, "min_p": 0.01},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.03, "temperature": 1.7},
    {"temperature": 0.6, "top_p": 0.95},
]


class TestRow(Structure):
    """The row that the testing functions sample."""

    __test__ = False
    _fields_ = [
        ("logits", POINTER(c_float)),
        ("sampling", POINTER(abi.Sampling)),
        ("history", POINTER(c_int32)),
        ("allowed_words", POINTER(c_uint32)),
        ("vocab_size", c_int32),
        ("history_count", c_int32),
        ("prompt_count", c_int32),
        ("position", c_int32),
    ]


class TestResult(Structure):
    """What the testing functions return of a row."""

    __test__ = False
    _fields_ = [
        ("token", c_int32),
        ("failure", c_int32),
        ("logprob", c_float),
        ("top_count", c_int32),
        ("top_tokens", c_int32 * MAX_TOP),
        ("top_logprobs", c_float * MAX_TOP),
    ]

    def tops(self) -> tuple[list[int], list[float]]:
        """Return the listed tokens and their log-probabilities."""
        return list(self.top_tokens)[: self.top_count], list(self.top_logprobs)[: self.top_count]


@dataclass(frozen=True)
class Row:
    """A row of logits and how to sample from it."""

    logits: np.ndarray
    settings: dict[str, Any] = field(default_factory=dict)
    bias: dict[int, float] = field(default_factory=dict)
    history: tuple[int, ...] = ()
    prompt_count: int = 0
    allowed: np.ndarray | None = None
    position: int = 0

    def native(self) -> tuple[TestRow, list[object]]:
        """Return the row as the library takes it, and what must stay alive meanwhile."""
        logits = np.ascontiguousarray(self.logits, dtype=np.float32)
        history = np.array([*self.history, 0], dtype=np.int32)
        sampling, kept = native_sampling(self.settings, self.bias)
        row = TestRow(
            logits=logits.ctypes.data_as(POINTER(c_float)),
            sampling=POINTER(abi.Sampling)(sampling),
            history=history.ctypes.data_as(POINTER(c_int32)),
            vocab_size=len(logits),
            history_count=len(self.history),
            prompt_count=self.prompt_count,
            position=self.position,
        )
        if self.allowed is not None:
            bits = np.packbits(self.allowed, bitorder="little")
            words = np.full(4 * -(-len(logits) // 32), 0xFF, dtype=np.uint8)
            words[: len(bits)] = bits
            row.allowed_words = words.ctypes.data_as(POINTER(c_uint32))
            kept.append(words)
        return row, [*kept, logits, history]

    def sample(self) -> TestResult:
        """Sample one token natively."""
        row, alive = self.native()
        result = TestResult()
        declare("glint_testing_sample", None, POINTER(TestRow), POINTER(TestResult))(byref(row), byref(result))
        del alive
        return result

    def sample_positions(self, count: int) -> np.ndarray:
        """Sample `count` following positions natively, each from the same logits."""
        row, alive = self.native()
        tokens = np.zeros(count, dtype=np.int32)
        function = declare("glint_testing_sample_positions", None, POINTER(TestRow), c_int32, POINTER(c_int32))
        function(byref(row), count, tokens.ctypes.data_as(POINTER(c_int32)))
        del alive
        return tokens

    def kept_tokens(self) -> list[int]:
        """Return the tokens that the native filters kept."""
        row, alive = self.native()
        tokens = np.zeros(len(self.logits), dtype=np.int32)
        function = declare("glint_testing_kept_tokens", c_int32, POINTER(TestRow), POINTER(c_int32))
        count = function(byref(row), tokens.ctypes.data_as(POINTER(c_int32)))
        del alive
        return tokens[:count].tolist()

    def changed(self) -> np.ndarray:
        """Return the logits after bias, mask and penalties, in NumPy's float32."""
        logits = self.logits.astype(np.float32).copy()
        for token, value in self.bias.items():
            logits[token] += np.float32(value)
        if self.allowed is not None:
            logits[~self.allowed] = -np.inf
        penalty = np.float32(self.settings.get("repetition_penalty", 1.0))
        seen = np.unique(np.array(self.history, dtype=np.int64))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        counts = np.bincount(np.array(self.history[self.prompt_count :], dtype=np.int64), minlength=len(logits))
        frequency = np.float32(self.settings.get("frequency_penalty", 0.0)) * counts.astype(np.float32)
        presence = np.float32(self.settings.get("presence_penalty", 0.0)) * (counts > 0).astype(np.float32)
        return logits - (frequency + presence)

    def kept_bounds(self, slack: float = 2e-7) -> tuple[set[int], set[int]]:
        """Return the kept tokens in float64, once with every cut a little tighter and once a little looser."""
        return self._kept(1 + slack), self._kept(1 - slack)

    def _kept(self, tightness: float) -> set[int]:
        probabilities = softmax(self.changed().astype(np.float64) / self.settings.get("temperature", 1.0))
        order = np.lexsort((np.arange(len(probabilities)), -probabilities))
        min_p = min(self.settings.get("min_p", 0.0) * tightness, 1.0)
        order = order[(probabilities[order] > 0) & (probabilities[order] >= min_p * probabilities.max())]
        order = order[: self.settings.get("top_k", 0) or None]
        mass = np.cumsum(probabilities[order]) / probabilities[order].sum()
        top_p = self.settings.get("top_p", 1.0)
        return set(order[: 1 + int(np.sum(mass < top_p / tightness))].tolist()) if top_p < 1 else set(order.tolist())


def native_sampling(settings: dict[str, Any], bias: dict[int, float]) -> tuple[abi.Sampling, list[object]]:
    """Return the settings as the library takes them, neutral where nothing is said."""
    neutral = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}
    tokens = (c_int32 * max(len(bias), 1))(*bias)
    values = (c_float * max(len(bias), 1))(*bias.values())
    sampling = abi.Sampling(struct_bytes=sizeof(abi.Sampling), bias_count=len(bias), **{**neutral, **settings})
    sampling.bias_tokens, sampling.bias_values = tokens, values
    return sampling, [sampling, tokens, values]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of float64 logits."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the log-probabilities in float64."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.exp(shifted).sum())


def random_bits(seed: int, choice_index: int, position: int, count: int) -> np.ndarray:
    """Return the random words of tokens 0 to count - 1."""
    bits = np.zeros(count, dtype=np.uint64)
    function = declare("glint_testing_random_bits", None, c_uint64, c_uint32, c_int32, c_int32, POINTER(c_uint64))
    function(seed, choice_index, position, count, bits.ctypes.data_as(POINTER(c_uint64)))
    return bits


def uniforms(bits: np.ndarray) -> np.ndarray:
    """Return the numbers strictly between 0 and 1 that random words stand for."""
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def random_row(seed: int, vocab_size: int, spread: float = 3.0, **settings: Any) -> Row:
    """Return a row with normal logits, a history, a bias, and an allowed mask on odd seeds."""
    generator = np.random.default_rng(seed)
    history = tuple(generator.integers(0, vocab_size, 40).tolist())
    return Row(
        logits=generator.normal(0, spread, vocab_size).astype(np.float32),
        settings=settings,
        bias={int(token): float(generator.uniform(-5, 5)) for token in generator.integers(0, vocab_size, 6)},
        history=history + history[-8:],
        prompt_count=20,
        allowed=generator.random(vocab_size) < 0.7 if seed % 2 else None,
        position=seed,
    )


def penalised_row(seed: int, settings: dict[str, Any]) -> Row:
    """Return the row of which it is recorded what transformers keeps: no bias, no mask, a repetition penalty."""
    with_penalty = {**settings, "repetition_penalty": KEPT_PENALTY}
    return replace(random_row(seed, KEPT_VOCAB_SIZE), settings=with_penalty, bias={}, allowed=None)


def chi_square_is_plausible(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether Pearson's statistic lies below the 1e-6 quantile (Wilson and Hilferty's approximation)."""
    is_large = expected >= 5
    observed = np.append(observed[is_large], observed[~is_large].sum())
    expected = np.append(expected[is_large], expected[~is_large].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return statistic < freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3


def prompt_logprobs(logits: np.ndarray, token: int, num_top: int) -> TestResult:
    """Return the native log-probabilities of a prompt position."""
    result = TestResult()
    function = declare("glint_testing_logprobs", None, POINTER(c_float), c_int32, c_int32, c_int32, POINTER(TestResult))
    values = np.ascontiguousarray(logits, dtype=np.float32)
    function(values.ctypes.data_as(POINTER(c_float)), len(values), token, num_top, byref(result))
    return result
