"""Runs requests step by step: while one step computes, the next is planned and submitted."""

import time
from ctypes import Array, c_uint32
from dataclasses import dataclass, field

from glint.engine.drafts import Drafts
from glint.engine.guarded_matcher import GuardedMatcher
from glint.engine.request import ActiveRequest, StepOutput
from glint.engine.scheduler import Scheduler
from glint.engine.settings import EngineSettings
from glint.engine.share import Share
from glint.engine.step_plan import StepPlan
from glint.native import abi
from glint.native.library import InvalidArgument, ItemOutcome, NativeEngine, OutOfPages, StepOutcome


@dataclass(frozen=True)
class StepSummary:
    """The figures of one call of `step`.

    `serial` numbers the collected steps; a call that collected none repeats it with all counts 0. `started_ids` are
    the requests that were scheduled in it for the first time. `num_tokens` were computed for `num_items` requests,
    `new_tokens` given out. The prefix cache was asked for `prefix_tokens_queried` tokens of the started requests and
    had `prefix_tokens_hit`. The pages are those at the end of the call. `seconds` is the time from the step's submit,
    or from the end of the step before it if that was later, to its own end, `seconds_ago` the time since then. Of
    `draft_tokens` drafts that were verified, `accepted_tokens` were right; the others count nowhere else.
    """

    serial: int
    pages_free: int
    pages_held: int
    pages_cached: int
    seconds: float = 0.0
    seconds_ago: float = 0.0
    num_items: int = 0
    num_tokens: int = 0
    new_tokens: int = 0
    prefix_tokens_queried: int = 0
    prefix_tokens_hit: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    started_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class _Step:
    """A submitted step: its requests in the order of the items, and the items that have a grammar.

    `constrained` pairs the index of an item with the position up to which it computes, None where the step before
    decides it. `draft_masks` has the masks of items that verify drafts which were known at the submit. By request id,
    `given` has the number of these, `drafts` the most that this step makes, and `coming` those that the step before
    made meanwhile. The requests in `speculating` make or verify some. With `is_decoding` there is no prompt in it. The
    other figures are those of the collected step: `num_tokens` that stay computed, `num_verified` drafts,
    `num_accepted` that were right, and its `seconds`.
    """

    plan: StepPlan
    ticket: abi.Ticket
    requests: list[ActiveRequest]
    constrained: list[tuple[int, int | None]]
    draft_masks: "dict[int, list[Array[c_uint32] | None]]"
    given: dict[int, int]
    drafts: dict[int, int]
    speculating: set[int]
    is_decoding: bool
    started: list[ActiveRequest]
    prefix_tokens_hit: int
    submitted_at: float
    coming: dict[int, tuple[int, ...]] = field(default_factory=dict)
    seconds: float = 0.0
    num_tokens: int = 0
    num_verified: int = 0
    num_accepted: int = 0


class StepLoop:
    """The unfinished requests of an engine and the steps that advance them.

    Between two calls at most one step is in flight, and none when no request is left. During `step` there are two:
    the next is planned on what the one in flight will have done, and submitted before that one is collected. Its
    decodes take the tokens that the other samples from the native side, and verify the drafts that it makes; a request
    that ended there is skipped by it. What a step brings for a request that has ended meanwhile is dropped. Pages are
    taken from a request only while nothing is in flight. Where they are too few for two steps of drafts, the next is
    submitted as soon as the other is collected, and computes while what that brought is taken in and passed on.
    """

    def __init__(self, native: NativeEngine, settings: EngineSettings) -> None:
        self.requests: dict[int, ActiveRequest] = {}
        self.num_preemptions = 0
        self._native = native
        self._num_pages = settings.num_pages
        drafts = settings.num_speculative_tokens
        sizes = settings.max_step_tokens, settings.max_num_seqs, settings.page_tokens
        self._scheduler = Scheduler(*sizes, drafts, settings.max_step_drafts)
        self._drafts = Drafts(drafts, settings.adapts_drafts, settings.max_step_drafts, settings.max_num_seqs)
        self._in_flight: _Step | None = None
        self._collected_at = 0.0
        self._was_busy = False
        self._last_step = StepSummary(serial=0, pages_free=settings.num_pages, pages_held=0, pages_cached=0)

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return self._scheduler.num_waiting

    @property
    def last_step(self) -> StepSummary:
        """The figures of the last call of `step`."""
        return self._last_step

    def add(self, request: ActiveRequest, leader_id: int | None, share: Share) -> None:
        """Queue a request; with a leader it waits for the leader's prompt, to share its pages."""
        self.requests[request.request_id] = request
        self._drafts.add(request.request_id)
        counts = len(request.prompt_tokens), request.max_new_tokens
        self._scheduler.add(request.request_id, *counts, leader_id, share, max_drafts=request.num_drafts)

    def abort(self, request_id: int) -> None:
        """End a request without a further output. One that has already ended changes nothing."""
        if request_id in self.requests:
            self._end(self.requests[request_id])
            self._drop_idle_step()

    def forget_all(self) -> None:
        """End every request of a native engine that is gone."""
        self._in_flight = None
        for request in self.requests.values():
            self._forget(request)
        self.requests.clear()

    def step(self) -> list[StepOutput]:
        """Collect one step and return what it added, in the order of the plan; the next one computes meanwhile.

        If it is interrupted, all requests in flight are aborted and the engine stays usable; after `RankFailed` every
        further step raises it again, and the engine is to be made anew.
        """
        try:
            return self._step()
        except BaseException:
            self._in_flight = None
            self._native.drop_steps()
            for request in list(self.requests.values()):
                self._end(request)
            raise

    def _step(self) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        if self._in_flight is None:
            self._in_flight = self._start_next(outputs)
        step = self._in_flight
        if step is not None:
            following = self._submit_next(outputs)
            outcome = self._native.collect_step(step.ticket)
            self._scheduler.finish_step(step.plan)
            self._take_drafts(step, outcome, following)
            self._observe_time(step, outcome)
            for item_index, _ in step.constrained:
                step.requests[item_index].accept(outcome.items[item_index])
            if following is not None:
                self._sample(following)
            elif step.speculating and not any(map(_is_known_to_end, step.requests, outcome.items)):
                following = self._start_next(outputs)
            self._in_flight = following
            outputs += self._take_in(step, outcome)
            self._was_busy = bool(self.requests)
            if step.speculating and following is None:
                self._in_flight = self._start_next(outputs)
            self._drop_idle_step()
        self._summarise(step, outputs)
        return outputs

    def _observe_time(self, step: _Step, outcome: StepOutcome) -> None:
        """Take in the time of a step that was collected just now; of a decode step the pause before it counts too."""
        now = time.perf_counter()
        step.seconds = now - max(step.submitted_at, self._collected_at)
        if step.is_decoding:
            began_at = self._collected_at if self._was_busy else step.submitted_at
            made = [
                step.drafts[request.request_id]
                for request, item in zip(step.requests, outcome.items, strict=True)
                if item.computed_tokens > item.first_position
            ]
            if made:
                self._drafts.observe_step(len(made), step.num_verified, sum(made), now - began_at)
        self._collected_at = now

    def _start_next(self, outputs: list[StepOutput]) -> _Step | None:
        """Submit the next plan behind a step that was collected, and let it sample.

        While that step is still the one in flight, its tokens are not taken in and no request is preempted.
        """
        step = self._submit_next(outputs)
        if step is not None:
            self._sample(step)
        return step

    def _take_drafts(self, step: _Step, outcome: StepOutcome, following: _Step | None) -> None:
        """Count what a collected step computed and the drafts that were right; keep those that it made.

        A request that is in the following step verifies them there.
        """
        step.num_tokens = sum(item.computed_tokens - item.first_position for item in outcome.items)
        if not step.speculating:
            return
        for request, item in zip(step.requests, outcome.items, strict=True):
            step.num_verified += item.num_verified
            request_id = request.request_id
            if request_id not in step.speculating or not item.tokens:
                continue
            num_right = len(item.tokens) - 1
            step.num_accepted += num_right
            has_ended = item.finish_reason != abi.FINISH_NONE
            self._drafts.observe(request_id, step.given.get(request_id, item.num_verified), num_right, has_ended)
            request.verified_tokens = item.num_verified
            if following is not None and request_id in following.drafts:
                following.coming[request_id] = item.drafts
                self._scheduler.take_drafts(request_id, len(item.tokens), None)
            else:
                request.drafts = item.drafts
                self._scheduler.take_drafts(request_id, len(item.tokens), len(item.drafts))

    def _submit_next(self, outputs: list[StepOutput]) -> _Step | None:
        """Submit the next plan that fits; requests that cannot run are failed into `outputs`.

        None means that there is nothing to run, or that the step in flight must be collected first.
        """
        while True:
            yielding_id = self._scheduler.find_yielding()
            if yielding_id is not None and self._in_flight is not None:
                return None
            if yielding_id is not None:
                self._scheduler.preempt(yielding_id)
                self._release(yielding_id)
            plan = self._scheduler.plan(self._available_pages())
            if not plan.items:
                return None
            try:
                return self._submit(plan)
            except _Refused as refusal:
                outputs.append(self._fail(refusal.request, str(refusal)))
            except OutOfPages as shortage:
                if self._in_flight is not None:
                    return None
                self._make_room(plan, shortage, outputs)

    def _submit(self, plan: StepPlan) -> _Step:
        """Start the forward pass of a plan and count it as done in the scheduler."""
        requests = [self.requests[item.request_id] for item in plan.items]
        draft_masks = {
            item_index: request.constraint.masks(request.drafts)
            for item_index, request in enumerate(requests)
            if request.constraint is not None and request.drafts
        }
        advances = [item.advance_tokens for item in plan.items]
        for item_index, masks in draft_masks.items():
            advances[item_index] = len(masks)
        native_ids = [self._native_id(request) for request in requests]
        is_decoding = plan.num_decodes == len(plan.items)
        request_ids = [request.request_id for request in requests]
        counts = self._drafts.choose(request_ids, is_decoding) if plan.may_draft else [0] * len(request_ids)
        ticket = self._native.submit_step([*zip(native_ids, advances, strict=True)], counts)
        self._drafts.submitted(request_ids, counts)
        submitted_at = time.perf_counter()
        drafts = dict(zip(request_ids, counts, strict=True))
        given = {request.request_id: len(request.drafts) for request in requests if request.drafts}
        speculating = {request_id for request_id, count in drafts.items() if count} | given.keys()
        speculating |= {item.request_id for item in plan.items[: plan.num_decodes] if item.advance_tokens > 1}
        for request in requests:
            request.drafts = ()
        cached = {
            plan.items[item_index].request_id: self._native.submitted_item(item_index).cached_tokens
            for item_index in range(len(requests) - plan.num_first, len(requests))
        }
        started = [self.requests[request_id] for request_id in cached if not self.requests[request_id].has_started]
        for request in started:
            request.has_started = True
        self._scheduler.start_step(plan, cached, drafts)
        step = _Step(
            plan=plan,
            ticket=ticket,
            requests=requests,
            constrained=[
                (item_index, self._end_of(item_index, advances[item_index]))
                for item_index, request in enumerate(requests)
                if request.constraint is not None
            ],
            draft_masks=draft_masks,
            given=given,
            drafts=drafts,
            speculating=speculating,
            is_decoding=is_decoding,
            started=started,
            prefix_tokens_hit=sum(cached[request.request_id] for request in started),
            submitted_at=submitted_at,
        )
        if not step.constrained:
            self._native.sample_step(ticket)
        return step

    def _end_of(self, item_index: int, advance: int) -> int | None:
        """The position up to which an item of the step just submitted computes; None where it is not known yet."""
        first_position = int(self._native.submitted_item(item_index).first_position)
        return None if first_position < 0 else first_position + advance

    def _sample(self, step: _Step) -> None:
        """Let a submitted step sample, with the masks of the rows that have a grammar; without any it does already.

        The step before it was collected and its tokens accepted, so the masks are those of the next token; they are
        made while the forward pass computes. Those behind drafts that were known before the submit were made there,
        and it dropped the drafts that a grammar does not allow; of the others a mask without words drops them.
        """
        if not step.constrained:
            return
        masks = []
        for item_index, end in step.constrained:
            request = step.requests[item_index]
            rows = step.draft_masks.get(item_index)
            coming: tuple[int, ...] = ()
            if rows is None:
                if request.constraint is None or not _has_next_token(request, request.constraint, end):
                    continue
                coming = step.coming.get(request.request_id, ())[: step.plan.items[item_index].advance_tokens - 1]
                rows = request.constraint.masks(coming)
            masks += [
                abi.Mask(item_index, row, len(words), 0, words) for row, words in enumerate(rows) if words is not None
            ]
            if len(rows) <= len(coming):
                masks.append(abi.Mask(item_index, len(rows), 0, 0, None))
        given = abi.sized(abi.Masks, count=len(masks), masks=(abi.Mask * len(masks))(*masks)) if masks else None
        self._native.sample_step(step.ticket, given)

    def _take_in(self, step: _Step, outcome: StepOutcome) -> list[StepOutput]:
        """Turn a collected step into outputs; requests that end are forgotten, those that ended before are passed."""
        outputs = []
        for request, item in zip(step.requests, outcome.items, strict=True):
            output = None if request.has_ended else request.take_in(item)
            if output is not None:
                outputs.append(output)
                if output.finish_reason is not None:
                    self._end(request, is_complete=output.finish_reason == "stop")
        return outputs

    def _summarise(self, step: _Step | None, outputs: list[StepOutput]) -> None:
        stats = self._native.stats()
        pages = {"pages_free": stats.pages_free, "pages_held": stats.pages_held, "pages_cached": stats.pages_cached}
        if step is None:
            self._last_step = StepSummary(serial=self._last_step.serial, **pages)
            return
        self._last_step = StepSummary(
            serial=self._last_step.serial + 1,
            **pages,
            seconds=step.seconds,
            seconds_ago=time.perf_counter() - self._collected_at,
            num_items=len(step.requests),
            num_tokens=step.num_tokens,
            draft_tokens=step.num_verified,
            accepted_tokens=step.num_accepted,
            new_tokens=sum(len(output.token_ids) for output in outputs),
            prefix_tokens_queried=sum(len(request.prompt_tokens) for request in step.started),
            prefix_tokens_hit=step.prefix_tokens_hit,
            started_ids=tuple(request.request_id for request in step.started),
        )

    def _drop_idle_step(self) -> None:
        """Bring the step in flight to its end where no request is left to read it."""
        if self._in_flight is not None and not self.requests:
            self._in_flight = None
            self._native.drop_steps()

    def _available_pages(self) -> int:
        """Pages that are free or cached without an owner; only asked for while requests wait for them."""
        if not self._scheduler.num_waiting:
            return 0
        stats = self._native.stats()
        return int(stats.pages_free + stats.pages_cached)

    def _native_id(self, request: ActiveRequest) -> int:
        """The native id of a planned request, which is passed to the native engine when it is first planned."""
        if request.native_id is None:
            try:
                request.native_id = self._native.add_request(request.to_native())
            except InvalidArgument as refusal:
                raise _Refused(request, str(refusal)) from refusal
        return request.native_id

    def _make_room(self, plan: StepPlan, shortage: OutOfPages, outputs: list[StepOutput]) -> None:
        """Give up the drafts, else preempt a request, or fail the only one where it can never fit."""
        if self._scheduler.drop_drafts():
            for request in self.requests.values():
                request.drafts = ()
            return
        preempted_id = self._scheduler.preempt_for_pages()
        if preempted_id is not None:
            self._release(preempted_id)
            return
        failure = (
            f"the request alone needs {shortage.missing_pages} pages more than the {self._num_pages} there "
            "are; give the page cache more memory or shorten the request"
        )
        outputs.append(self._fail(self.requests[plan.items[0].request_id], failure))

    def _release(self, request_id: int) -> None:
        """Take the pages of a request that was preempted; the full ones stay in the prefix cache."""
        self.num_preemptions += 1
        self.requests[request_id].drafts = ()
        native_id = self.requests[request_id].native_id
        if native_id is not None:
            self._native.release_pages(native_id)

    def _fail(self, request: ActiveRequest, failure: str) -> StepOutput:
        self._end(request)
        return request.fail(failure)

    def _end(self, request: ActiveRequest, is_complete: bool = False) -> None:
        """Forget a request everywhere: the one place where native requests are freed."""
        self._forget(request)
        del self.requests[request.request_id]
        self._was_busy = self._was_busy and bool(self.requests)
        if request.native_id is not None:
            reusable_tokens = request.reusable_tokens(is_complete)
            if reusable_tokens is not None:
                self._native.limit_reuse(request.native_id, reusable_tokens)
            self._native.free_request(request.native_id)

    def _forget(self, request: ActiveRequest) -> None:
        request.has_ended = True
        request.constraint = None
        self._drafts.forget(request.request_id)
        self._scheduler.remove(request.request_id)


def _has_next_token(request: ActiveRequest, constraint: GuardedMatcher, end: int | None) -> bool:
    """Whether a step that computes up to a position samples; one that follows drafts, None, always does."""
    return end is None or end >= len(request.prompt_tokens) + constraint.num_accepted


def _is_known_to_end(request: ActiveRequest, item: ItemOutcome) -> bool:
    """Whether a request ends with what a step brought, as far as is known before its text is."""
    return item.finish_reason != abi.FINISH_NONE or (request.constraint is not None and request.constraint.is_over)


class _Refused(Exception):
    """The native engine does not take a request."""

    def __init__(self, request: ActiveRequest, reason: str) -> None:
        super().__init__(reason)
        self.request = request
