"""How a request's tokens are chosen and when they end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from glint.errors import RequestError

MAX_CHOICES = 128
MIN_POSITIVE = 1e-37
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_SEQUENCES = 256
MAX_STOP_SEQUENCE_TOKENS = 256
MAX_CLOSING_CHARS = 1024
SEED_LIMIT = 2**64
TOKEN_LIMIT = 2**31


@dataclass(frozen=True)
class SamplingParams:
    """The sampling of a request, checked at construction.

    The defaults sample from the model's own distribution. `temperature` 0 is greedy; `top_k` 0 or -1, `top_p` 1 and
    `min_p` 0 cut nothing off. `top_p` and `repetition_penalty` are at least `MIN_POSITIVE`, which a 32-bit float tells
    from 0. `seed` None draws a new seed for every request. `max_tokens` None means until the model stops or the context
    is full. `logprobs` N gives each token's log-probability and the N best beside it; `prompt_logprobs` the same for
    the prompt. `stop` strings end the text before them, or after them with `include_stop_str_in_output`.
    `stop_token_sequences` end the answer at the token that completes one of them; its tokens and their text stay in
    the answer. Before `min_tokens` tokens no stop of any kind ends the answer; only a complete grammar does, or a
    stop token that the end of thinking forces.
    After `thinking_budget` tokens of thinking the model writes `thinking_closing_text` and ends its thinking; None sets
    no limit. An answer without thinking is not changed by it. Anything out of range raises `RequestError`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    thinking_budget: int | None = None
    thinking_closing_text: str = ""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    stop_token_sequences: Sequence[Sequence[int]] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._normalise()
        _check_integer("n", self.n, 1, MAX_CHOICES)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_number("top_p", self.top_p, MIN_POSITIVE, 1.0)
        _check_integer("top_k", self.top_k, 0, TOKEN_LIMIT - 1, also="or -1 for all tokens")
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, MIN_POSITIVE, 1000.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        for token, bias in self.logit_bias.items():
            _check_integer("logit_bias token id", token, 0, TOKEN_LIMIT - 1)
            _check_number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        _check_optional_integer("seed", self.seed, 0, SEED_LIMIT - 1)
        _check_optional_integer("max_tokens", self.max_tokens, 1, TOKEN_LIMIT - 1)
        self._check_min_tokens()
        self._check_thinking()
        _check_optional_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_optional_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._check_stops()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be True or False", name)

    def _normalise(self) -> None:
        """Bring the accepted spellings to one: `stop` a tuple of strings, `top_k` -1 as 0, collections our own."""
        stop = (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        sequences = enumerate(_as_tuple("stop_token_sequences", self.stop_token_sequences))
        own = tuple(_as_tuple(f"stop_token_sequences[{index}]", sequence) for index, sequence in sequences)
        object.__setattr__(self, "stop_token_sequences", own)
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias is {self.logit_bias!r}; it must map token ids to numbers", "logit_bias")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_min_tokens(self) -> None:
        _check_integer("min_tokens", self.min_tokens, 0, TOKEN_LIMIT - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens is {self.min_tokens}; it must be at most max_tokens, which is {self.max_tokens}"
            raise RequestError(message, "min_tokens")

    def _check_thinking(self) -> None:
        _check_optional_integer("thinking_budget", self.thinking_budget, 0, TOKEN_LIMIT - 1)
        field, text = "thinking_closing_text", self.thinking_closing_text
        if not isinstance(text, str):
            raise RequestError(f"{field} is {text!r}; it must be a text", field)
        if len(text) > MAX_CLOSING_CHARS:
            raise RequestError(f"{field} has {len(text)} characters; at most {MAX_CLOSING_CHARS} are allowed", field)

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop contains {text!r}; every stop must be a string that is not empty", "stop")
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids entry", token, 0, TOKEN_LIMIT - 1)
        field = "stop_token_sequences"
        if len(self.stop_token_sequences) > MAX_STOP_SEQUENCES:
            count = len(self.stop_token_sequences)
            raise RequestError(f"{field} has {count} sequences; at most {MAX_STOP_SEQUENCES} are allowed", field)
        for index, sequence in enumerate(self.stop_token_sequences):
            if not 1 <= len(sequence) <= MAX_STOP_SEQUENCE_TOKENS:
                allowed = f"it must have 1 to {MAX_STOP_SEQUENCE_TOKENS}"
                raise RequestError(f"{field}[{index}] has {len(sequence)} tokens; {allowed}", field)
            for token in sequence:
                _check_integer(f"{field}[{index}] entry", token, 0, TOKEN_LIMIT - 1)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return tuple(value)
    raise RequestError(f"{name} is {value!r}; it must be a list", _field_of(name))


def _check_integer(name: str, value: Any, low: int, high: int, also: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        allowed = f"an integer from {low} to {high}" + (f", {also}" if also else "")
        raise RequestError(f"{name} is {value!r}; it must be {allowed}", _field_of(name))


def _check_optional_integer(name: str, value: Any, low: int, high: int) -> None:
    if value is not None:
        _check_integer(name, value, low, high)


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}", _field_of(name))


def _field_of(name: str) -> str:
    """The field that a name such as "logit_bias[7]" or "stop_token_ids entry" speaks of."""
    return name.partition(" ")[0].partition("[")[0]
