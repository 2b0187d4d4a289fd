"""One completion in flight: its prompt and parameters, its output so far, and its form for the native engine."""

from ctypes import c_float, c_int32, pointer
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from glint.engine.guarded_matcher import GuardedMatcher
from glint.engine.reuse import Reuse
from glint.native import abi
from glint.native.library import ItemOutcome
from glint.sampling import SamplingParams
from glint.text.tokenizer import Detokenizer, StopStrings, Tokenizer

FinishReason = Literal["stop", "length", "failed"]

_FINISH_REASONS: dict[int, FinishReason | None] = {
    abi.FINISH_NONE: None,
    abi.FINISH_STOP: "stop",
    abi.FINISH_LENGTH: "length",
    abi.FINISH_FAILED: "failed",
}
_FAILURES = {
    abi.FAILURE_NOT_FINITE: "the logits held a NaN or an infinity; the weights or the logit_bias are at fault",
    abi.FAILURE_NOTHING_ALLOWED: "no token was allowed; loosen the mask or the logit_bias",
}


class StepOutput(NamedTuple):
    """The tokens and text that one step added to one request.

    `text` is None without a tokenizer; it may lag behind `token_ids` while a character or a stop string is unfinished.
    `pieces` is the text token by token where the step added several tokens, and empty otherwise.
    `logprobs` has a mapping from token id to log-probability for each of `token_ids`, None where they were not asked
    for. `prompt_logprobs`, one entry per prompt token with None for the first, comes with the first output of a
    request that asked for them. `finish_reason` is set on the last output; `failure` says why it is "failed".
    `stop_reason` is the stop string or the stop token id that ended the request; None where the model or a stop token
    sequence ended it. Of `draft_tokens` drafts that the step verified, `accepted_tokens` were right and are
    among `token_ids`: those behind a stop string are not.
    """

    request_id: int
    text: str | None
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...] | None
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None
    cached_tokens: int
    finish_reason: FinishReason | None
    failure: str | None
    stop_reason: str | int | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    pieces: tuple[str, ...] = ()


class OutputText:
    """The growing text of one request: tokens in, text out, ended by stop strings.

    The text of the first `min_tokens` tokens is not searched for stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(list(params.stop), include_stop=params.include_stop_str_in_output)
        self._has_stops = bool(params.stop)
        self._unsearched_tokens = params.min_tokens if params.stop else 0

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, token: int) -> tuple[str, bool]:
        """Take a token; give the text that is now certain and whether a stop string ended it."""
        text = self._detokenizer.push(token)
        if self._unsearched_tokens:
            self._unsearched_tokens -= 1
            return text, False
        return self._stops.push(text) if self._has_stops else (text, False)

    def finish(self) -> tuple[str, bool]:
        """Give the text held back so far and whether a stop string ended it after all."""
        text, is_stopped = self._stops.push(self._detokenizer.finish())
        return (text, True) if is_stopped else (text + self._stops.finish(), False)


@dataclass(slots=True)
class ActiveRequest:
    """One completion from its submit to its last output. `native_id` is set while the native engine holds it.

    `has_ended` is set with the last output or by an abort; tokens of a step in flight are then dropped. Without `reuse`
    later requests can share everything. A step makes up to `num_drafts` drafts; those of the last step are `drafts`,
    and the step that is taken in has verified `verified_tokens` of those before.
    """

    request_id: int
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    seed: int
    choice_index: int
    cache_salt: int
    stop_tokens: tuple[int, ...]
    max_new_tokens: int
    text: OutputText | None
    constraint: GuardedMatcher | None = None
    reuse: Reuse | None = None
    num_drafts: int = 0
    drafts: tuple[int, ...] = ()
    verified_tokens: int = 0
    native_id: int | None = None
    cached_tokens: int | None = None
    prompt_logprobs: dict[int, dict[int, float]] = field(default_factory=dict)
    has_started: bool = False
    has_sent_output: bool = False
    has_ended: bool = False

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The choices of a prompt share it, so only the first asks for its log-probabilities."""
        return self.params.prompt_logprobs is not None and self.choice_index == 0

    def accept(self, item: ItemOutcome) -> None:
        """Give the grammar the tokens that a step sampled, ahead of `take_in`: the next step's mask needs them."""
        if self.constraint is None:
            return
        for token in item.tokens[:-1] if item.finish_reason == abi.FINISH_STOP else item.tokens:
            self.constraint.accept(token)
        if item.finish_reason != abi.FINISH_NONE:
            self.constraint.close()

    def take_in(self, item: ItemOutcome) -> StepOutput | None:
        """Turn this request's part of a step into its output; None where only prompt tokens were computed."""
        if self.cached_tokens is None:
            self.cached_tokens = item.cached_tokens
        if self.reuse is not None and self.reuse.unless_token in item.tokens:
            self.reuse = None
        new_logprobs = self._sort_logprobs(item.logprobs) if item.logprobs else []
        finish_reason = _FINISH_REASONS[item.finish_reason]
        if self.constraint is not None:
            if self.constraint.failure is not None:
                return self.fail(self.constraint.failure)
            if self.constraint.is_complete:
                finish_reason = "stop"
        if not item.tokens and finish_reason is None:
            return None
        pieces, num_tokens, is_stopped = self._extend_text(item.tokens, finish_reason)
        output = StepOutput(
            self.request_id,
            None if self.text is None else "".join(pieces),
            item.tokens[:num_tokens],
            None if self.params.logprobs is None else tuple(new_logprobs[:num_tokens]),
            None if self.has_sent_output else self._all_prompt_logprobs(),
            self.cached_tokens,
            "stop" if is_stopped else finish_reason,
            _FAILURES.get(item.failure, f"failure {item.failure}") if finish_reason == "failed" else None,
            self._stop_reason(item.tokens, is_stopped) if is_stopped or finish_reason == "stop" else None,
            self.verified_tokens,
            min(self.verified_tokens, max(0, len(item.tokens) - 1), num_tokens),
            pieces if len(pieces) > 1 else (),
        )
        self.verified_tokens = 0
        self.has_sent_output = True
        return output

    def _stop_reason(self, tokens: tuple[int, ...], is_stopped: bool) -> str | int | None:
        """The stop string or the stop token id that ended the request; None where neither did."""
        if is_stopped:
            return None if self.text is None else self.text.matched_stop
        return tokens[-1] if tokens and tokens[-1] in self.params.stop_token_ids else None

    def _sort_logprobs(self, logprobs: dict[int, dict[int, float]]) -> list[dict[int, float]]:
        """Keep the log-probabilities of prompt positions for the first output, give those of new tokens."""
        num_prompt = len(self.prompt_tokens)
        self.prompt_logprobs |= {position: entry for position, entry in logprobs.items() if position < num_prompt}
        return [entry for position, entry in logprobs.items() if position >= num_prompt]

    def reusable_tokens(self, is_complete: bool) -> int | None:
        """How many tokens later requests can share; None where they can share all, as far as is known."""
        if self.reuse is None:
            return None
        return self.reuse.num_tokens if is_complete else max(self.reuse.num_tokens, len(self.prompt_tokens))

    def fail(self, failure: str) -> StepOutput:
        """The last output of a request that cannot run on."""
        return StepOutput(
            request_id=self.request_id,
            text=None if self.text is None else self.text.finish()[0],
            token_ids=(),
            logprobs=None if self.params.logprobs is None else (),
            prompt_logprobs=None,
            cached_tokens=self.cached_tokens or 0,
            finish_reason="failed",
            failure=failure,
        )

    def _extend_text(
        self, tokens: tuple[int, ...], finish_reason: FinishReason | None
    ) -> tuple[tuple[str, ...], int, bool]:
        """Give the new text by token, how many of the tokens count, and whether a stop string ended the request.

        A stop token adds text only where the request wants the stop in its output. The text that was held back until
        the end belongs to the last token.
        """
        if self.text is None:
            return (), len(tokens), False
        if finish_reason is None and len(tokens) == 1:
            piece, is_stopped = self.text.push(tokens[0])
            return (piece,), 1, is_stopped
        hides_stop = finish_reason == "stop" and not self.params.include_stop_str_in_output
        shown = tokens[:-1] if hides_stop and tokens[-1] in self.stop_tokens else tokens
        pieces = []
        for index, token in enumerate(shown):
            piece, is_stopped = self.text.push(token)
            pieces.append(piece)
            if is_stopped:
                return tuple(pieces), index + 1, True
        if finish_reason is None:
            return tuple(pieces), len(tokens), False
        pieces += [""] * (max(len(tokens), 1) - len(pieces))
        piece, is_stopped = self.text.finish()
        pieces[-1] += piece
        return tuple(pieces), len(tokens), is_stopped

    def _all_prompt_logprobs(self) -> tuple[dict[int, float] | None, ...] | None:
        if not self.wants_prompt_logprobs:
            return None
        return tuple(self.prompt_logprobs.get(position) for position in range(len(self.prompt_tokens)))

    def to_native(self) -> abi.Request:
        """The request as the native engine takes it; the struct keeps the arrays that it points to."""
        sequences = self.params.stop_token_sequences
        sequence_tokens = [token for sequence in sequences for token in sequence]
        return abi.sized(
            abi.Request,
            prompt_count=len(self.prompt_tokens),
            prompt_tokens=(c_int32 * len(self.prompt_tokens))(*self.prompt_tokens),
            max_new_tokens=self.max_new_tokens,
            stop_token_count=len(self.stop_tokens),
            stop_tokens=(c_int32 * len(self.stop_tokens))(*self.stop_tokens),
            stop_sequence_tokens=(c_int32 * len(sequence_tokens))(*sequence_tokens),
            stop_sequence_lengths=(c_int32 * len(sequences))(*map(len, sequences)),
            stop_sequence_count=len(sequences),
            cache_salt=self.cache_salt,
            sampling=pointer(self._native_sampling()),
        )

    def _native_sampling(self) -> abi.Sampling:
        params = self.params
        bias = params.logit_bias
        return abi.sized(
            abi.Sampling,
            choice_index=self.choice_index,
            seed=self.seed,
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            top_k=params.top_k,
            has_logprobs=params.logprobs is not None,
            num_logprobs=params.logprobs or 0,
            has_prompt_logprobs=self.wants_prompt_logprobs,
            num_prompt_logprobs=(params.prompt_logprobs or 0) if self.wants_prompt_logprobs else 0,
            bias_count=len(bias),
            bias_tokens=(c_int32 * len(bias))(*bias.keys()),
            bias_values=(c_float * len(bias))(*bias.values()),
        )
