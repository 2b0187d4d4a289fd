"""The scheduler: which requests advance in a step, and by how much."""

from collections import OrderedDict
from collections.abc import Iterable

from glint.scheduling.plan import Progress, StepItem, StepPlan
from glint.scheduling.request import Request


class Scheduler:
    """Plans steps under a token budget, in order of arrival.

    There are no phases: every request has known and computed tokens, and a step advances some requests. Requests that
    only decode come first, then the rest of prompts already begun, then waiting requests in order of arrival. Every
    running request is older than every waiting one, so preempting the newest and putting it first in the queue keeps
    that order. The scheduler moves no pages: it is told how many are available and is told what a step did.
    """

    def __init__(self, max_step_tokens: int, max_step_items: int, page_tokens: int) -> None:
        for name, value in (
            ("max_step_tokens", max_step_tokens),
            ("max_step_items", max_step_items),
            ("page_tokens", page_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self._max_step_tokens = max_step_tokens
        self._max_step_items = max_step_items
        self._page_tokens = page_tokens
        self._running: dict[int, Request] = {}
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._is_admission_paused = False

    @property
    def num_running(self) -> int:
        """Requests that have been scheduled and not preempted since."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self._running or self._waiting)

    def add(self, request_id: int, prompt_tokens: int, leader_id: int | None = None) -> None:
        """Queue a request of at least one prompt token.

        With a leader, the request waits until the leader's prompt is computed, to find it in the prefix cache.
        """
        self._waiting[request_id] = Request(
            request_id=request_id, prompt_tokens=prompt_tokens, known_tokens=prompt_tokens, leader_id=leader_id
        )

    def remove(self, request_id: int) -> None:
        """Forget a request that finished or was given up; one that is not known changes nothing."""
        self._running.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def plan(self, available_pages: int) -> StepPlan:
        """Decide the next step, given how many pages are free or cached without an owner.

        Waiting requests that get their first tokens are running from now on.
        """
        running = self._running.values()
        ordered = [request for request in running if request.is_decoding]
        ordered += [request for request in running if not request.is_decoding]
        items: list[StepItem] = []
        budget_tokens = self._max_step_tokens
        for request in ordered:
            if budget_tokens == 0:
                break
            items.append(StepItem(request.request_id, min(request.remaining_tokens, budget_tokens)))
            budget_tokens -= items[-1].advance_tokens
        spare_pages = available_pages - sum(self._pages_to_grow(request) for request in running)
        while budget_tokens > 0 and self._can_admit(spare_pages):
            request_id, request = self._waiting.popitem(last=False)
            self._running[request_id] = request
            items.append(StepItem(request.request_id, min(request.remaining_tokens, budget_tokens)))
            budget_tokens -= items[-1].advance_tokens
            spare_pages -= self._pages_to_grow(request)
        return StepPlan(tuple(items))

    def apply(self, results: Iterable[Progress]) -> None:
        """Take in what a step did; the queue may move again. Finished requests are still to be removed."""
        for progress in results:
            request = self._running[progress.request_id]
            request.computed_tokens = progress.computed_tokens
            request.known_tokens += progress.new_tokens
        self._is_admission_paused = False

    def preempt_newest(self) -> int | None:
        """Put the newest running request back at the head of the queue and return its id.

        Called when a planned step was refused for want of pages; plan again afterwards. Nothing is admitted until a
        step has been applied. None means that the oldest request is alone and still does not fit: it never will.
        """
        if len(self._running) < 2:
            return None
        request_id, request = self._running.popitem()
        request.computed_tokens = 0
        self._waiting[request_id] = request
        self._waiting.move_to_end(request_id, last=False)
        self._is_admission_paused = True
        return request_id

    def _can_admit(self, spare_pages: int) -> bool:
        """Whether the head of the queue may start now.

        Its known tokens must fit beside what the running requests still need. Cached pages are not counted in its
        favour, so the estimate errs towards waiting. With nothing running it always may.
        """
        if self._is_admission_paused or not self._waiting or len(self._running) >= self._max_step_items:
            return False
        request = next(iter(self._waiting.values()))
        if request.leader_id is not None and not self._is_leader_done(request.leader_id):
            return False
        return not self._running or self._pages_of(request.known_tokens) <= spare_pages

    def _is_leader_done(self, leader_id: int) -> bool:
        leader = self._running.get(leader_id)
        return leader is None or leader.has_computed_prompt

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_tokens)

    def _pages_to_grow(self, request: Request) -> int:
        """Pages that a running request still takes for its known tokens, and one more for those to come."""
        return self._pages_of(request.known_tokens) - self._pages_of(request.computed_tokens) + 1
