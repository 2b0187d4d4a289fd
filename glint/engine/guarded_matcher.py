"""The grammar of one request while it runs: which tokens may come next, and when it is complete."""

from collections.abc import Sequence
from contextlib import suppress
from ctypes import Array, c_uint32

from glint.engine.min_tokens import WORD_BITS, TokenMatcher


class GuardedMatcher:
    """A matcher whose failures end its own request alone: every exception becomes `failure`.

    `is_over` says that no further mask is needed: the grammar is complete, the matcher failed, or the request ended.
    """

    def __init__(self, matcher: TokenMatcher, mask_words: int) -> None:
        self._matcher: TokenMatcher | None = matcher
        self._mask_words = mask_words
        self.num_accepted = 0
        self.is_complete = False
        self.failure: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether the matcher was let go."""
        return self._matcher is None

    def mask(self) -> "Array[c_uint32] | None":
        """The mask of the next token; None where every token may come or where the matcher was let go."""
        if self._matcher is None:
            return None
        try:
            words = self._matcher.mask()
            if words is not None and len(words) != self._mask_words:
                raise ValueError(f"its mask has {len(words)} words, the vocabulary needs {self._mask_words}")
        except Exception as problem:
            self._fail("gave no mask", problem)
            return None
        return words

    def masks(self, drafts: Sequence[int]) -> "list[Array[c_uint32] | None]":
        """The mask of the next token, then those behind each draft, up to one that is not allowed or the last.

        A matcher that fails on drafts fails nothing: the drafts behind are given up.
        """
        found = [self.mask()]
        if self._matcher is None or not drafts:
            return found
        with suppress(Exception):
            walker = self._matcher.fork()
            for draft in drafts:
                words = found[-1]
                if words is not None and not words[draft // WORD_BITS] >> draft % WORD_BITS & 1:
                    break
                walker.accept(draft)
                if walker.is_finished:
                    break
                words = walker.mask()
                found.append(None if words is None else type(words).from_buffer_copy(words))
        return found

    def accept(self, token_id: int) -> None:
        """Take in a sampled token."""
        self.num_accepted += 1
        if self._matcher is None:
            return
        try:
            self._matcher.accept(token_id)
            self.is_complete = self._matcher.is_finished
        except Exception as problem:
            self._fail(f"does not take token {token_id}", problem)
            return
        if self.is_complete:
            self.close()

    def close(self) -> None:
        """Let the matcher go."""
        self._matcher = None

    def _fail(self, what: str, problem: Exception) -> None:
        reason = str(problem) or type(problem).__name__
        self.failure = f"the grammar of the request {what}: {reason}; change the grammar"
        self.close()
