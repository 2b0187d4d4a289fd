"""The engine: takes requests, plans steps, runs them natively, and turns tokens into text."""

import secrets
from collections.abc import Iterable, Sequence
from ctypes import pointer
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Self, get_args

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.shards import CheckpointFile
from glint.checkpoint.table import Checkpoint
from glint.config import EngineSettings, Kernels
from glint.errors import EngineError, RequestError
from glint.native import abi
from glint.native.library import (
    InvalidArgument,
    NativeEngine,
    OutOfPages,
    StepOutcome,
    Unsupported,
    choose_library,
    load_library,
)
from glint.request import ActiveRequest, OutputText, StepOutput
from glint.sampling import SEED_LIMIT, SamplingParams
from glint.scheduling.plan import Progress, StepPlan
from glint.scheduling.scheduler import Scheduler
from glint.text.tokenizer import Tokenizer

SALT_LIMIT = 2**63
_MODEL_FIELDS = tuple(field[0] for field in abi.Model._fields_ if field[0] != "struct_bytes")


class Engine:
    """Runs requests on one model. One thread uses it; `close` or its context frees everything.

    Every request that was submitted ends in exactly one output with a finish reason, or by `abort`. A request that
    fails takes no other with it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: EngineSettings,
        tokenizer: Tokenizer | None,
        library_path: str | Path | None = None,
    ) -> None:
        """Load the native library and the weights. Without a tokenizer outputs carry no text."""
        self.settings = settings
        self._model = checkpoint.config
        self._eos_tokens = checkpoint.eos_token_ids
        self._tokenizer = tokenizer
        path = choose_library(settings.device, library_path)
        library = load_library(path)
        backend = library.glint_backend_name().decode()
        if backend != settings.device:
            raise EngineError(f"{path} computes on {backend!r}, but device is {settings.device!r}; make them agree")
        options = _native_options(settings, checkpoint.config, checkpoint.files)
        try:
            self._native = NativeEngine(library, options, checkpoint.tensor_array())
        except Unsupported as refusal:
            if settings.kernels == "auto":
                raise
            raise EngineError(
                f"kernels {settings.kernels!r} need instructions that this processor or this build of the library "
                "does not have; use --kernels auto, kernels='auto' in Python"
            ) from refusal
        self._scheduler = Scheduler(settings.max_step_tokens, settings.max_step_items, settings.page_tokens)
        self._requests: dict[int, ActiveRequest] = {}
        self._requests_by_native_id: dict[int, ActiveRequest] = {}
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.has_work

    @property
    def kernels(self) -> str:
        """The kernel set that computes, never "auto"."""
        chosen = self.stats().kernels
        return str(next(name for name in get_args(Kernels) if abi_kernels(name) == chosen))

    def stats(self) -> abi.EngineStats:
        """Counters of the native engine."""
        return self._native.stats()

    def measure_read(self, byte_count: int) -> float:
        """The memory ceiling of this machine with the engine's threads, in bytes read per second."""
        return self._native.measure_read(byte_count)

    def check(self) -> None:
        """Check the native engine's books; raises where something does not add up."""
        self._native.check()

    def close(self) -> None:
        """Free everything, requests in flight included. Calling it again does nothing."""
        self._native.close()
        for request_id in self._requests:
            self._scheduler.remove(request_id)
        self._requests.clear()
        self._requests_by_native_id.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, prompt_tokens: Iterable[int], params: SamplingParams, cache_salt: int = 0) -> list[int]:
        """Queue a request and return the ids of its `params.n` choices.

        The choices share one seed and the pages of the prompt. Raises `RequestError` where the request cannot be
        served; then nothing was queued.
        """
        try:
            prompt = tuple(index(token) for token in prompt_tokens)
        except TypeError as problem:
            raise RequestError(f"the prompt holds something that is not a token id: {problem}") from problem
        self._check_request(prompt, params, cache_salt)
        room = self.settings.max_model_len - len(prompt)
        seed = secrets.randbelow(SEED_LIMIT) if params.seed is None else params.seed
        eos_tokens = () if params.ignore_eos else self._eos_tokens
        ids = list(range(self._next_id, self._next_id + params.n))
        self._next_id += params.n
        for choice_index, request_id in enumerate(ids):
            self._requests[request_id] = ActiveRequest(
                request_id=request_id,
                prompt_tokens=prompt,
                params=params,
                seed=seed,
                choice_index=choice_index,
                cache_salt=cache_salt,
                stop_tokens=tuple(dict.fromkeys((*eos_tokens, *params.stop_token_ids))),
                max_new_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                text=None if self._tokenizer is None else OutputText(self._tokenizer, params),
            )
            self._scheduler.add(request_id, len(prompt), leader_id=ids[0] if choice_index else None)
        return ids

    def abort(self, request_id: int) -> None:
        """End a request without a further output. One that has already ended changes nothing."""
        if request_id in self._requests:
            self._end(self._requests[request_id])

    def step(self) -> list[StepOutput]:
        """Run one step and return what it added, in the order of the plan.

        If it is interrupted, all requests in flight are aborted and the engine stays usable.
        """
        try:
            return self._step()
        except BaseException:
            self._native.finish_interrupted_step()
            for request in list(self._requests.values()):
                self._end(request)
            raise

    def _step(self) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        outcome = self._run_next_plan(outputs)
        if outcome is None:
            return outputs
        progress = []
        for item in outcome.items:
            request = self._requests_by_native_id[item.request_id]
            progress.append(Progress(request.request_id, item.computed_tokens, len(item.tokens)))
            output = request.take_in(item)
            if output is not None:
                outputs.append(output)
        self._scheduler.apply(progress)
        for output in outputs:
            if output.finish_reason is not None:
                self.abort(output.request_id)
        return outputs

    def _run_next_plan(self, outputs: list[StepOutput]) -> StepOutcome | None:
        """Run the next plan that fits; requests that cannot run are failed into `outputs`. None: nothing to run."""
        while True:
            stats = self._native.stats()
            plan = self._scheduler.plan(stats.pages_free + stats.pages_cached)
            if not plan.items:
                return None
            try:
                ticket = self._native.submit_step(
                    [(self._native_id(item.request_id), item.advance_tokens) for item in plan.items]
                )
            except _Refused as refusal:
                outputs.append(self._fail(refusal.request, str(refusal)))
                continue
            except OutOfPages as shortage:
                self._make_room(plan, shortage, outputs)
                continue
            self._native.sample_step(ticket)
            return self._native.collect_step(ticket)

    def _native_id(self, request_id: int) -> int:
        """The native id of a planned request, which is handed to the native engine when it is first planned."""
        request = self._requests[request_id]
        if request.native_id is None:
            try:
                request.native_id = self._native.add_request(request.to_native())
            except InvalidArgument as refusal:
                raise _Refused(request, str(refusal)) from refusal
            self._requests_by_native_id[request.native_id] = request
        return request.native_id

    def _make_room(self, plan: StepPlan, shortage: OutOfPages, outputs: list[StepOutput]) -> None:
        """Preempt the newest request, or fail the only one where it can never fit."""
        preempted_id = self._scheduler.preempt_newest()
        if preempted_id is not None:
            native_id = self._requests[preempted_id].native_id
            if native_id is not None:
                self._native.release_pages(native_id)
            return
        failure = (
            f"the request alone needs {shortage.missing_pages} pages more than the {self.settings.num_pages} there "
            "are; give the page cache more memory or shorten the request"
        )
        outputs.append(self._fail(self._requests[plan.items[0].request_id], failure))

    def _fail(self, request: ActiveRequest, failure: str) -> StepOutput:
        self._end(request)
        return request.fail(failure)

    def _end(self, request: ActiveRequest) -> None:
        """Forget a request everywhere: the one place where native requests are freed."""
        self._scheduler.remove(request.request_id)
        del self._requests[request.request_id]
        if request.native_id is not None:
            del self._requests_by_native_id[request.native_id]
            self._native.free_request(request.native_id)

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
            ("logit_bias", params.logit_bias),
        ):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise RequestError(f"{name} holds token id {token}; ids go from 0 to {vocab_size - 1}")
        if not 0 <= cache_salt < SALT_LIMIT:
            raise RequestError(f"cache_salt is {cache_salt}; it goes from 0 to {SALT_LIMIT - 1}")
        if params.stop and self._tokenizer is None:
            raise RequestError(f"stop is {params.stop!r}, but stop strings need the tokenizer; use stop_token_ids")


class _Refused(Exception):
    """The native engine does not take a request."""

    def __init__(self, request: ActiveRequest, reason: str) -> None:
        super().__init__(reason)
        self.request = request


def abi_kernels(name: str) -> int:
    """The number of a kernel set in the ABI."""
    return int(getattr(abi, f"KERNELS_{name.upper()}"))


def _native_options(settings: EngineSettings, model: ModelConfig, files: Sequence[CheckpointFile]) -> abi.EngineOptions:
    """The settings as the native engine takes them; the struct keeps what it points to."""
    native_model = abi.sized(abi.Model, **{name: getattr(model, name) for name in _MODEL_FIELDS})
    native_files = (abi.File * len(files))(
        *(abi.sized(abi.File, path=bytes(file.path), byte_count=file.byte_count) for file in files)
    )
    return abi.sized(
        abi.EngineOptions,
        kernels=abi_kernels(settings.kernels),
        num_threads=settings.threads,
        num_ranks=settings.tp,
        row_slices=settings.row_slices,
        expert_layout=getattr(abi, f"EXPERT_LAYOUT_{settings.expert_layout.upper()}"),
        page_tokens=settings.page_tokens,
        num_pages=settings.num_pages,
        max_step_tokens=settings.max_step_tokens,
        max_step_items=settings.max_step_items,
        max_requests=settings.max_requests,
        max_context_tokens=settings.max_model_len,
        file_count=len(files),
        model=pointer(native_model),
        files=native_files,
    )
