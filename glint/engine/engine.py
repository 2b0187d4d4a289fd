"""The engine: takes requests, plans steps, runs them natively, and turns tokens into text."""

import secrets
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import chain
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Self

from glint.checkpoint.table import Checkpoint
from glint.engine.guarded_matcher import GuardedMatcher
from glint.engine.loading import shown_loading
from glint.engine.min_tokens import WORD_BITS, MinTokens, TokenMatcher
from glint.engine.native_options import kernels_name, native_options, refusing_in_public_words
from glint.engine.request import ActiveRequest, OutputText, StepOutput
from glint.engine.reuse import Reuse
from glint.engine.settings import EngineSettings
from glint.engine.share import DEFAULT_SHARE, Share
from glint.engine.step_loop import StepLoop, StepSummary
from glint.engine.thinking import ThinkingLimit, encode_closing, find_thinking_tokens
from glint.errors import EngineError, RequestError
from glint.native import abi
from glint.native.library import NativeEngine, Unsupported, load_progress, open_library
from glint.sampling import SEED_LIMIT, SamplingParams
from glint.text.grammar import Grammar
from glint.text.tags import Tag
from glint.text.tokenizer import Tokenizer

__all__ = ["Engine", "StepSummary"]

SALT_LIMIT = 2**63


class Engine:
    """Runs requests on one model. One thread uses it; `close` or its context frees everything.

    Every request that was submitted ends in exactly one output with a finish reason, or by `abort`. A request that
    fails takes no other with it. Steps overlap: while one computes, the next is planned and submitted.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: EngineSettings,
        tokenizer: Tokenizer | None,
        library_path: str | Path | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Load the native library and the weights. Without a tokenizer outputs carry no text.

        With `say` the loading is shown on a terminal, and `say` is given one line about it.
        """
        self.settings = settings
        self._model = checkpoint.config
        self._eos_tokens = checkpoint.eos_token_ids
        self.use_tokenizer(tokenizer)
        has_mtp = settings.num_speculative_tokens > 0
        if has_mtp and not checkpoint.mtp_tensors:
            raise EngineError(
                f"num_speculative_tokens is {settings.num_speculative_tokens}, but the checkpoint has no MTP layer to "
                "draft with; leave it out, or use a checkpoint that has the layer"
            )
        library = open_library(settings.device, library_path)
        options = native_options(settings, checkpoint.config, checkpoint.files)
        options.synthetic_seed = checkpoint.synthetic_seed
        is_cuda = settings.device == "cuda"
        showing = nullcontext() if say is None else shown_loading(lambda: load_progress(library), say, is_cuda)
        try:
            with showing, refusing_in_public_words():
                self._native = NativeEngine(library, options, checkpoint.tensor_array(has_mtp))
        except Unsupported as refusal:
            if settings.kernels == "auto" or is_cuda:
                raise
            raise EngineError(
                f"kernels {settings.kernels!r} need instructions that this processor or this build of the library "
                "does not have; use --kernels auto, kernels='auto' in Python"
            ) from refusal
        self._loop = StepLoop(self._native, settings)
        self._next_id = 0

    def use_tokenizer(self, tokenizer: Tokenizer | None) -> None:
        """Use this tokenizer for the text of later requests, where it was not read yet when the engine was made."""
        self._tokenizer = tokenizer
        self._thinking_tokens = find_thinking_tokens(tokenizer)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._loop.requests)

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return self._loop.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return self._loop.num_waiting

    @property
    def num_preemptions(self) -> int:
        """How often a request gave its pages back for want of room and was queued again."""
        return self._loop.num_preemptions

    @property
    def last_step(self) -> StepSummary:
        """The figures of the last call of `step`."""
        return self._loop.last_step

    @property
    def kernels(self) -> str:
        """The kernel set that computes, never "auto"."""
        return kernels_name(self.stats().kernels)

    def stats(self) -> abi.EngineStats:
        """Counters of the native engine."""
        return self._native.stats()

    def measure_read(self, byte_count: int) -> float:
        """Measure the peak bandwidth of memory reads with the engine's threads, in bytes per second."""
        return self._native.measure_read(byte_count)

    def measure_arithmetic(self) -> abi.Arithmetic:
        """Measure what the engine's threads compute per second from the first cache."""
        return self._native.measure_arithmetic()

    def check(self) -> None:
        """Check the native engine's books; raises where something does not add up."""
        self._native.check()

    def close(self) -> None:
        """Free everything, requests in flight included. Calling it again does nothing."""
        self._native.close()
        self._loop.forget_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self,
        prompt_tokens: Iterable[int],
        params: SamplingParams,
        cache_salt: int = 0,
        grammar: Grammar | None = None,
        begins_after: int | None = None,
        share: Share = DEFAULT_SHARE,
        reuse: Reuse | None = None,
        is_thinking: bool | None = None,
    ) -> list[int]:
        """Queue a request and return the ids of its `params.n` choices.

        The choices share one seed and the pages of the prompt. With a grammar every choice follows it by itself, from
        its first token or from the token behind `begins_after`, and ends where the grammar is complete. `share`
        names the owner of the request, which decides when it is computed and nothing else. `reuse` decides which of its
        pages are evicted first once it has ended. `is_thinking` says whether the prompt ends inside thinking; None
        leaves that to the last think tag of the prompt. A thinking budget does not hold beside a grammar that begins
        with the first token. Raises `RequestError` where the request cannot be served; then nothing was queued.
        """
        try:
            prompt = tuple(map(index, prompt_tokens))
        except TypeError as problem:
            raise RequestError(f"the prompt holds something that is not a token id: {problem}") from problem
        self._check_request(prompt, params, cache_salt)
        room = self.settings.max_model_len - len(prompt)
        max_new_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = secrets.randbelow(SEED_LIMIT) if params.seed is None else params.seed
        eos_tokens = () if params.ignore_eos else self._eos_tokens
        stop_tokens = tuple(dict.fromkeys((*eos_tokens, *params.stop_token_ids)))
        make_limit = self._thinking_limit(prompt, params, is_thinking, grammar is not None and begins_after is None)
        constraints = [self._constrain(params, stop_tokens, grammar, begins_after, make_limit) for _ in range(params.n)]
        ids = list(range(self._next_id, self._next_id + params.n))
        self._next_id += params.n
        for choice_index, request_id in enumerate(ids):
            request = ActiveRequest(
                request_id=request_id,
                prompt_tokens=prompt,
                params=params,
                seed=seed,
                choice_index=choice_index,
                cache_salt=cache_salt,
                stop_tokens=stop_tokens,
                max_new_tokens=max_new_tokens,
                text=None if self._tokenizer is None else OutputText(self._tokenizer, params),
                constraint=constraints[choice_index],
                num_drafts=self.settings.num_speculative_tokens,
                reuse=reuse,
            )
            self._loop.add(request, leader_id=ids[0] if choice_index else None, share=share)
        return ids

    def abort(self, request_id: int) -> None:
        """End a request without a further output. One that has already ended changes nothing.

        Tokens of a step in flight are dropped. With the last request the step in flight ends too.
        """
        self._loop.abort(request_id)

    def step(self) -> list[StepOutput]:
        """Collect one step and return what it added, in the order of the plan; the next one computes meanwhile.

        If it is interrupted, all requests in flight are aborted and the engine stays usable; after `RankFailed` every
        further step raises it again, and the engine is to be made anew.
        """
        return self._loop.step()

    def _thinking_limit(
        self, prompt: tuple[int, ...], params: SamplingParams, is_thinking: bool | None, begins_with_grammar: bool
    ) -> Callable[[TokenMatcher | None], TokenMatcher] | None:
        """Makes what holds a choice to its thinking budget, around its grammar; None where there is no budget."""
        if params.thinking_budget is None:
            return None
        tokens = self._thinking_tokens
        if self._tokenizer is None or tokens is None:
            message = (
                f"thinking_budget is {params.thinking_budget}, but this model has no token {Tag.THINK_END.value!r} to "
                "end its thinking; leave thinking_budget out"
            )
            raise RequestError(message, "thinking_budget")
        closing = encode_closing(self._tokenizer, params.thinking_closing_text)
        begins = tokens.ends_open(prompt) if is_thinking is None else is_thinking
        if begins_with_grammar:
            return None
        return lambda grammar: ThinkingLimit(params, tokens, closing, begins, self._model.vocab_size, grammar)

    def _constrain(
        self,
        params: SamplingParams,
        stop_tokens: tuple[int, ...],
        grammar: Grammar | None,
        begins_after: int | None,
        make_limit: Callable[[TokenMatcher | None], TokenMatcher] | None,
    ) -> GuardedMatcher | None:
        """What decides which tokens may come next in one choice; None where every token may."""
        try:
            matcher: TokenMatcher | None = None if grammar is None else grammar.start(begins_after)
        except Exception as problem:
            raise RequestError(f"the grammar of the request cannot start: {problem}; change the grammar") from problem
        if make_limit is not None:
            matcher = make_limit(matcher)
        if params.min_tokens:
            matcher = MinTokens(params, stop_tokens, self._model.vocab_size, matcher)
        return None if matcher is None else GuardedMatcher(matcher, -(-self._model.vocab_size // WORD_BITS))

    def _check_request(self, prompt: tuple[int, ...], params: SamplingParams, cache_salt: int) -> None:
        vocab_size = self._model.vocab_size
        limit = self.settings.max_model_len
        if not prompt:
            raise RequestError("the prompt has no tokens; give at least one")
        if len(prompt) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but at most {limit - 1} fit beside an answer in max_model_len "
                f"{limit}; shorten the prompt or raise max_model_len"
            )
        for name, tokens in (
            ("prompt", prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("stop_token_sequences", chain.from_iterable(params.stop_token_sequences)),
            ("logit_bias", params.logit_bias),
        ):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise RequestError(f"{name} holds token id {token}; ids go from 0 to {vocab_size - 1}", name)
        if not 0 <= cache_salt < SALT_LIMIT:
            raise RequestError(f"cache_salt is {cache_salt}; it goes from 0 to {SALT_LIMIT - 1}")
        if params.stop and self._tokenizer is None:
            raise RequestError(f"stop is {params.stop!r}, but stop strings need the tokenizer; use stop_token_ids")
