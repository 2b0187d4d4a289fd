"""Comparing greedy answers with the reference, token by token."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tests.cpu.tapped_engine import Answer
from tests.reference.expected import GAP_BOUND, BestTokens, Rows

__all__ = ["GAP_BOUND", "Comparison", "Model", "Rows", "answer_rows", "assert_parity", "compare"]


class Model(Protocol):
    """What computes the logits of every position."""

    def logits(self, token_ids: list[int]) -> Rows:
        """Logits [len, vocab]."""


@dataclass(frozen=True)
class Comparison:
    """How far an answer goes with the reference: tokens alike, the gap where it leaves it, the logprob error before."""

    num_alike: int
    gap_at_difference: float | None
    largest_error: float

    @property
    def is_clear_difference(self) -> bool:
        """Whether the reference was sure of another token."""
        return self.gap_at_difference is not None and self.gap_at_difference >= GAP_BOUND


def compare(best: BestTokens, answer: Answer) -> Comparison:
    """Compare an answer and its five best log-probabilities with the reference's best tokens along its own answer.

    Up to the first difference both have seen the same tokens. A token of the five that is not among the reference's
    best is an endless error.
    """
    largest_error = 0.0
    for index, (token, expected) in enumerate(zip(answer.tokens, best.greedy, strict=True)):
        if token != expected:
            return Comparison(index, float(best.gaps[index]), largest_error)
        tokens, values = list(answer.logprobs[index]), np.array(list(answer.logprobs[index].values()))
        assert len(tokens) == 5 and tokens[0] == token
        known = dict(zip(best.tokens[index].tolist(), best.logprobs[index].tolist(), strict=True))
        own = np.array([known.get(listed, -np.inf) for listed in tokens])
        errors = np.abs([values - own, values - best.logprobs[index, :5]])
        largest_error = max(largest_error, float(errors.max()))
    return Comparison(len(answer.tokens), None, largest_error)


def assert_parity(comparisons: list[Comparison], logprob_bound: float, count: int) -> None:
    """No clear difference, log-probabilities alike, and enough tokens of the answers compared to mean something."""
    print(*comparisons, sep="\n")
    assert not any(comparison.is_clear_difference for comparison in comparisons)
    assert max(comparison.largest_error for comparison in comparisons) < logprob_bound
    assert sum(comparison.num_alike for comparison in comparisons) > 0.7 * count * len(comparisons)


def answer_rows(model: Model, answer: Answer) -> Rows:
    """The reference's logits before each token of an answer, from one pass over prompt and answer."""
    return model.logits(answer.prompt + answer.tokens)[len(answer.prompt) - 1 : -1]
