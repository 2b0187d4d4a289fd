"""Comparing greedy answers with the reference, token by token."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tests.cpu.tapped_engine import Answer

GAP_BOUND = 0.02
Rows = NDArray[np.float64]


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


def compare(rows: Rows, answer: Answer) -> Comparison:
    """Compare an answer and its five best log-probabilities with the reference's logits [count, vocab]."""
    logprobs = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
    largest_error = 0.0
    for index, token in enumerate(answer.tokens):
        best = np.sort(logprobs[index])[::-1]
        if int(rows[index].argmax()) != token:
            return Comparison(index, float(best[0] - best[1]), largest_error)
        tokens, values = list(answer.logprobs[index]), np.array(list(answer.logprobs[index].values()))
        assert len(tokens) == 5 and tokens[0] == token
        errors = np.abs([values - logprobs[index, tokens], values - best[:5]])
        largest_error = max(largest_error, float(errors.max()))
    return Comparison(len(answer.tokens), None, largest_error)


def answer_rows(model: Model, answer: Answer) -> Rows:
    """The reference's logits before each token of an answer, from one pass over prompt and answer."""
    return model.logits(answer.prompt + answer.tokens)[len(answer.prompt) - 1 : -1]
