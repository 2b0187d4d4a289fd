"""Offline use: a model as one object that turns prompts into completions."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from glint.checkpoint.hub import locate_model
from glint.checkpoint.table import open_checkpoint
from glint.engine.args import EngineArgs
from glint.engine.engine import Engine
from glint.engine.memory_plan import size_engine
from glint.engine.request import FinishReason, StepOutput
from glint.engine.settings import EngineSettings
from glint.engine.share import DEFAULT_SHARE, Share
from glint.errors import RequestError
from glint.sampling import SamplingParams
from glint.text.chat import render_prompt
from glint.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Choice:
    """One answer to a prompt.

    `text` is None without a tokenizer. `logprobs` has one mapping from token id to log-probability per token of
    `token_ids`, the chosen token first; None where they were not asked for. `failure` says why an answer is "failed".
    """

    text: str | None
    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    finish_reason: FinishReason
    failure: str | None


@dataclass(frozen=True)
class Completion:
    """The result for one prompt: `choices` has `n` answers; the shorter names speak of the first.

    `cached_tokens` is how much of the prompt was found in the prefix cache. `prompt_logprobs` has one entry per prompt
    token, None for the first; it is None where it was not asked for.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, float] | None] | None
    cached_tokens: int
    choices: list[Choice]

    @property
    def text(self) -> str | None:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens of the first choice, a stop token included."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        """Log-probabilities of the first choice."""
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended: "stop", "length" or "failed"."""
        return self.choices[0].finish_reason

    @property
    def failure(self) -> str | None:
        """Why the first choice failed, None where it did not."""
        return self.choices[0].failure


@dataclass
class _Gathered:
    """The outputs for one prompt so far, by request id of its choices."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: dict[int, list[StepOutput]] = field(default_factory=dict)

    def complete(self) -> Completion:
        """Join the outputs of every choice; all must have ended."""
        first, *_ = self.outputs.values()
        prompt_logprobs = first[0].prompt_logprobs
        return Completion(
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if prompt_logprobs is None else list(prompt_logprobs),
            cached_tokens=first[-1].cached_tokens,
            choices=[_join(outputs) for outputs in self.outputs.values()],
        )


def _join(outputs: list[StepOutput]) -> Choice:
    last = outputs[-1]
    return Choice(
        text=None if last.text is None else "".join(output.text or "" for output in outputs),
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=None if last.logprobs is None else [entry for output in outputs for entry in output.logprobs or ()],
        finish_reason=cast(FinishReason, last.finish_reason),
        failure=last.failure,
    )


class LLM:
    """A model, loaded and ready. Use it as a context manager, or call `close`, to free everything.

    One thread uses it at a time.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        engine: str | Path | None = None,
        skip_tokenizer: bool = False,
        progress: bool = False,
        **options: Any,
    ) -> None:
        """Open the model and load the engine.

        `model` is a folder, or a model id of the hub, owner/name[@revision], which is fetched where the cache lacks it;
        `source` tells its folder and commit. `engine` is the path of a native library, instead of the device's own.
        With `skip_tokenizer` prompts are token ids and completions have no text. `progress` shows memory plan and
        loading on standard error. `options` are the fields of `EngineArgs`, such as device="cuda" or tp=8.
        """
        self.source = locate_model(model)
        folder = self.source.folder
        checkpoint = open_checkpoint(folder)
        has_mtp = bool(checkpoint.mtp_tensors)
        sized = size_engine(folder, checkpoint.config, checkpoint.files, EngineArgs(**options), engine, has_mtp)
        self.tokenizer = None if skip_tokenizer else Tokenizer(folder)
        self._generation = checkpoint.generation
        if progress:
            sized.show()
        say = partial(print, file=sys.stderr) if progress else None
        self.engine = Engine(checkpoint, sized.settings, self.tokenizer, engine, say)

    @property
    def settings(self) -> EngineSettings:
        """The settings in force."""
        return self.engine.settings

    def close(self) -> None:
        """Free the engine and everything it holds. Calling it again does nothing."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def default_params(self, **changes: Any) -> SamplingParams:
        """The sampling parameters of the model's generation_config, with the given fields changed."""
        return SamplingParams(**(self._generation.sampling() | changes))

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        prompt_token_ids: Iterable[Iterable[int]] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        shares: Share | Sequence[Share] = DEFAULT_SHARE,
    ) -> list[Completion]:
        """Complete all prompts together and return one result per prompt, in their order.

        Prompts are texts or token ids, not both. Sampling parameters are one for all or one per prompt; without them
        the model's generation_config is followed. A bad prompt raises `RequestError` before anything runs; a prompt
        that fails while running has the finish reason "failed" and harms no other. `progress` shows a bar when
        standard error is a terminal. `shares`, one for all or one per prompt, decide which prompts are computed first.
        """
        gathered = self._read_prompts(prompts, prompt_token_ids)
        params = self._spread_params(sampling_params, len(gathered))
        return self._run(gathered, params, progress, shares)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        **template_arguments: Any,
    ) -> list[Completion]:
        """Answer one conversation, or several together, and return one result per conversation.

        A message is a mapping with "role" and "content". The prompt is the model's own chat template, given
        `template_arguments`. Control tokens that messages spell are text; with `allow_special_tokens=True` they are
        control tokens. Without sampling parameters the model's generation_config is followed and the answer ends where
        the model ends it.
        """
        is_single = not messages or isinstance(messages[0], Mapping)
        conversations = [messages] if is_single else messages
        gathered = [
            self._encode_chat(cast(Sequence[Message], conversation), template_arguments)
            for conversation in conversations
        ]
        if sampling_params is None:
            sampling_params = self.default_params(max_tokens=None)
        return self._run(gathered, self._spread_params(sampling_params, len(gathered)), progress)

    def render(self, messages: Sequence[Message], **template_arguments: Any) -> str:
        """The prompt of a conversation, as the model's chat template writes it."""
        return render_prompt(self.need_tokenizer(), list(messages), **template_arguments).text

    def stream(
        self, prompt: str | Iterable[int], sampling_params: SamplingParams | None = None
    ) -> Iterator[StepOutput]:
        """Complete one prompt, text or token ids, and give each step's output as it comes.

        The last output has a finish reason. Leaving the loop early aborts the request.
        """
        token_ids = self._encode(prompt).prompt_token_ids if isinstance(prompt, str) else prompt
        return self._stream(token_ids, self.default_params() if sampling_params is None else sampling_params)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **template_arguments: Any
    ) -> Iterator[StepOutput]:
        """Answer one conversation as `chat` does, and give each step's output as it comes, as `stream` does."""
        entry = self._encode_chat(messages, template_arguments)
        if sampling_params is None:
            sampling_params = self.default_params(max_tokens=None)
        return self._stream(entry.prompt_token_ids, sampling_params)

    def _stream(self, token_ids: Iterable[int], params: SamplingParams) -> Iterator[StepOutput]:
        self._check_idle()
        _check_params(params)
        if params.n != 1:
            raise RequestError(f"n is {params.n}, but a stream has one choice; use generate")
        (request_id,) = self.engine.submit(token_ids, params)
        try:
            is_finished = False
            while not is_finished:
                for output in self.engine.step():
                    is_finished = output.finish_reason is not None
                    yield output
        finally:
            self.engine.abort(request_id)

    def _run(
        self,
        gathered: list[_Gathered],
        params: Sequence[SamplingParams],
        progress: bool,
        shares: Share | Sequence[Share] = DEFAULT_SHARE,
    ) -> list[Completion]:
        self._check_idle()
        spread = [shares] * len(gathered) if isinstance(shares, Share) else shares
        if len(spread) != len(gathered):
            raise RequestError(f"{len(spread)} shares for {len(gathered)} prompts; give one for all or one for each")
        owners: dict[int, _Gathered] = {}
        unfinished: set[int] = set()
        try:
            for index, (entry, sampling, share) in enumerate(zip(gathered, params, spread, strict=True)):
                try:
                    ids = self.engine.submit(entry.prompt_token_ids, sampling, share=share)
                except RequestError as problem:
                    raise RequestError(f"prompt {index}: {problem}") from problem
                entry.outputs = {request_id: [] for request_id in ids}
                owners |= dict.fromkeys(ids, entry)
                unfinished |= set(ids)
            with _progress_bar(len(unfinished), progress) as advance:
                while unfinished:
                    for output in self.engine.step():
                        owners[output.request_id].outputs[output.request_id].append(output)
                        if output.finish_reason is not None:
                            unfinished.remove(output.request_id)
                            advance()
        finally:
            for request_id in unfinished:
                self.engine.abort(request_id)
        return [entry.complete() for entry in gathered]

    def _check_idle(self) -> None:
        if self.engine.has_work:
            raise RequestError("a stream of this LLM is still running; read it to its end or close it first")

    def _read_prompts(
        self, prompts: str | Sequence[str] | None, prompt_token_ids: Iterable[Iterable[int]] | None
    ) -> list[_Gathered]:
        if (prompts is None) == (prompt_token_ids is None):
            raise RequestError("give either prompts or prompt_token_ids, not both and not neither")
        if prompt_token_ids is not None:
            return [_Gathered(None, _as_list(ids)) for ids in prompt_token_ids]
        texts = [prompts] if isinstance(prompts, str) else prompts or []
        return [self._encode(text) for text in texts]

    def _spread_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [self.default_params() if params is None else params] * count
        if not isinstance(params, Sequence) or isinstance(params, str):
            _check_params(params)
        for one in params:
            _check_params(one)
        if len(params) != count:
            raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one for all or one for each")
        return params

    def _encode_chat(self, messages: Sequence[Message], template_arguments: dict[str, Any]) -> _Gathered:
        tokenizer = self.need_tokenizer()
        prompt = render_prompt(tokenizer, list(messages), **template_arguments)
        return _Gathered(prompt.text, tokenizer.encode_prompt(prompt))

    def _encode(self, text: str) -> _Gathered:
        """Turn a text into tokens; the special tokens that it spells are special tokens."""
        if not isinstance(text, str):
            raise RequestError(f"a prompt is {text!r}; it must be a text, token ids go to prompt_token_ids")
        return _Gathered(text, self.need_tokenizer().encode(text, add_special_tokens=True))

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises `RequestError` where it was left out."""
        if self.tokenizer is None:
            raise RequestError("texts need the tokenizer, which skip_tokenizer left out; give prompt_token_ids")
        return self.tokenizer


def _check_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params is or holds {params!r}; SamplingParams are needed, one for all or a list")


def _as_list(ids: Iterable[int]) -> list[int]:
    if not isinstance(ids, Iterable) or isinstance(ids, str):
        raise RequestError(f"prompt_token_ids holds {ids!r}; each of its entries is a list of token ids")
    return list(ids)


@contextmanager
def _progress_bar(total: int, is_wanted: bool) -> Iterator[Callable[[], None]]:
    """Give a function that counts one finished completion, shown as a bar where wanted and where a terminal is."""
    if not (is_wanted and sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("completions", total=total)
        yield lambda: bar.advance(task)
