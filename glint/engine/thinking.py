"""Ends the thinking of a request at its budget."""

from collections.abc import Callable, Sequence
from copy import copy
from ctypes import Array, c_uint32
from dataclasses import dataclass

from glint.engine.min_tokens import WORD_BITS, TokenMatcher
from glint.errors import RequestError
from glint.sampling import SamplingParams
from glint.text.tags import Tag
from glint.text.tokenizer import Tokenizer

CALL_NAME_TOKENS = 64


@dataclass(frozen=True)
class ThinkingTokens:
    """The tokens between which a model thinks, and those of the calls that end its thinking as well."""

    close: int
    open: int | None
    call: int | None
    call_end: int | None
    key: int | None
    token_bytes: Callable[[int], bytes]

    def ends_open(self, prompt_tokens: Sequence[int]) -> bool:
        """Whether a prompt ends inside thinking: the last of its think tags opens it."""
        tags = (token for token in reversed(prompt_tokens) if token in (self.open, self.close))
        return next(tags, self.close) == self.open


def find_thinking_tokens(tokenizer: Tokenizer | None) -> ThinkingTokens | None:
    """The tokens of a tokenizer; None where no single token ends thinking."""
    close = None if tokenizer is None else tokenizer.token_to_id(Tag.THINK_END)
    if tokenizer is None or close is None:
        return None
    opening, call, call_end, key = map(tokenizer.token_to_id, (Tag.THINK, Tag.CALL, Tag.CALL_END, Tag.KEY))
    return ThinkingTokens(close, opening, call, call_end, key, tokenizer.token_bytes)


def encode_closing(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of the text that closes thinking; raises RequestError where the text spells a control token."""
    found = tokenizer.control_tokens.find(text) if text else []
    if found:
        message = f"thinking_closing_text holds the control token {found[0].token!r}; leave that out of the text"
        raise RequestError(message, "thinking_closing_text")
    return tokenizer.encode(text) if text else []


class ThinkingLimit:
    """Counts the tokens of thinking; at the budget the mask has one token only, until thinking is closed.

    These are the tokens of the closing text, once, and then the one that closes thinking. Before the budget the mask is
    that of the grammar, if there is one. Thinking begins as the output parser finds it: at the end of the prompt, or
    where the opening token comes before any content, at the start, behind thinking or behind a call. A call inside
    thinking ends it, so the budget waits while the tokens may still become the name of a call.
    """

    def __init__(
        self,
        params: SamplingParams,
        tokens: ThinkingTokens,
        closing: Sequence[int],
        is_thinking: bool,
        vocab_size: int,
        grammar: TokenMatcher | None,
    ) -> None:
        self._budget = params.thinking_budget or 0
        self._tokens = tokens
        self._forced = [*closing, tokens.close]
        self._is_thinking = is_thinking
        self._is_before_content = True
        self._num_thought = 0
        self._num_forced = 0
        self._name: list[int] | None = None
        self._mask_words = -(-vocab_size // WORD_BITS)
        self._grammar = grammar

    @property
    def is_finished(self) -> bool:
        """Whether the grammar is complete."""
        return self._grammar is not None and self._grammar.is_finished

    @property
    def _is_spent(self) -> bool:
        return self._is_thinking and self._num_thought >= self._budget and self._name is None

    def mask(self) -> "Array[c_uint32] | None":
        """The next token that closes thinking where the budget is spent, else the mask of the grammar."""
        if not self._is_spent:
            return None if self._grammar is None else self._grammar.mask()
        token = self._forced[self._num_forced]
        words = (c_uint32 * self._mask_words)()
        words[token // WORD_BITS] = 1 << token % WORD_BITS
        return words

    def accept(self, token_id: int) -> None:
        """Take in the token that came."""
        if self._grammar is not None:
            self._grammar.accept(token_id)
        if self._is_thinking:
            self._think(token_id)
        elif token_id == self._tokens.call_end:
            self._is_before_content = True
        elif self._is_before_content and token_id == self._tokens.open:
            self._is_thinking = True
        elif self._is_before_content:
            is_blank = not self._tokens.token_bytes(token_id).strip()
            self._is_before_content = is_blank or token_id == self._tokens.close

    def fork(self) -> "ThinkingLimit":
        """Another matcher at the same place, which goes its own way."""
        other = copy(self)
        other._grammar = None if self._grammar is None else self._grammar.fork()
        return other

    def _think(self, token_id: int) -> None:
        tokens = self._tokens
        if token_id == tokens.close:
            self._end(is_before_content=True)
        elif self._is_name_of_call(token_id):
            self._end(is_before_content=token_id == tokens.call_end)
        elif self._is_spent:
            self._num_forced += 1
        else:
            self._num_thought += 1
            self._name = self._next_name(token_id)

    def _is_name_of_call(self, token_id: int) -> bool:
        """Whether a token ends the name of a call, which is one word."""
        if self._name is None or token_id not in (self._tokens.key, self._tokens.call_end):
            return False
        return len(b"".join(map(self._tokens.token_bytes, self._name)).split()) == 1

    def _next_name(self, token_id: int) -> list[int] | None:
        """The tokens that may become the name of a call; None where none can. At the budget no new name begins."""
        tokens = self._tokens
        if token_id == tokens.call and self._num_thought <= self._budget:
            return []
        is_over = token_id in (tokens.call, tokens.key, tokens.call_end)
        if self._name is None or is_over or len(self._name) == CALL_NAME_TOKENS - 1:
            return None
        return [*self._name, token_id]

    def _end(self, is_before_content: bool) -> None:
        self._is_thinking = False
        self._is_before_content = is_before_content
        self._forced = self._forced[-1:] if self._num_forced else self._forced
        self._num_forced = 0
        self._name = None
