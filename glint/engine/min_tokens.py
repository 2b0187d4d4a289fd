"""Holds stop tokens back until a request has its least number of tokens."""

from collections.abc import Sequence
from copy import copy
from ctypes import Array, c_uint32
from typing import Protocol

from glint.sampling import SamplingParams

WORD_BITS = 32


class TokenMatcher(Protocol):
    """Follows the tokens of one request and says which may come next."""

    @property
    def is_finished(self) -> bool:
        """Whether nothing may follow."""

    def mask(self) -> "Array[c_uint32] | None":
        """One bit for each token that may come next, 32 to a word; None where every token may."""

    def accept(self, token_id: int) -> None:
        """Take in the token that came."""

    def fork(self) -> "TokenMatcher":
        """Another matcher at the same place, which goes its own way."""


class MinTokens:
    """Masks the tokens that would end a request before it has `min_tokens`, in the mask of its grammar if it has one.

    Where the grammar allows nothing but the end, the end comes early.
    """

    def __init__(
        self, params: SamplingParams, stop_tokens: Sequence[int], vocab_size: int, grammar: TokenMatcher | None
    ) -> None:
        self._min_tokens = params.min_tokens
        self._stop_tokens = stop_tokens
        self._stop_sequences = [tuple(sequence) for sequence in params.stop_token_sequences]
        self._grammar = grammar
        self._tokens: list[int] = []
        full, rest = divmod(vocab_size, WORD_BITS)
        self._all_words = [0xFFFFFFFF] * full + ([(1 << rest) - 1] if rest else [])

    @property
    def is_finished(self) -> bool:
        """Whether the grammar is complete."""
        return self._grammar is not None and self._grammar.is_finished

    def mask(self) -> "Array[c_uint32] | None":
        """The mask of the grammar, without the stops while the request is too short."""
        allowed = None if self._grammar is None else self._grammar.mask()
        if len(self._tokens) >= self._min_tokens:
            return allowed
        words = (c_uint32 * len(self._all_words))(*(self._all_words if allowed is None else allowed))
        for token in (*self._stop_tokens, *self._ends_of_sequences()):
            words[token // WORD_BITS] &= ~(1 << token % WORD_BITS) & 0xFFFFFFFF
        return words if allowed is None or any(words) else allowed

    def accept(self, token_id: int) -> None:
        """Take in the token that came."""
        if len(self._tokens) < self._min_tokens:
            self._tokens.append(token_id)
        if self._grammar is not None:
            self._grammar.accept(token_id)

    def fork(self) -> "MinTokens":
        """Another matcher at the same place, which goes its own way."""
        other = copy(self)
        other._tokens = [*self._tokens]
        other._grammar = None if self._grammar is None else self._grammar.fork()
        return other

    def _ends_of_sequences(self) -> list[int]:
        """The tokens that would complete a stop token sequence here."""
        count, tokens = len(self._tokens), self._tokens
        return [
            sequence[-1]
            for sequence in self._stop_sequences
            if count >= len(sequence) - 1 and tuple(tokens[count - len(sequence) + 1 :]) == sequence[:-1]
        ]
