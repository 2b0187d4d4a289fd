"""The scheduler: which requests advance in a step, and by how much."""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice

from glint.scheduling.plan import StepItem, StepPlan
from glint.scheduling.request import Request


class Scheduler:
    """Plans steps under a token budget, in order of arrival, ahead of the results of the steps before.

    There are no phases: every request has known and computed tokens, and a step advances some requests. Requests that
    decode come first, then the chunks of prompts already begun, then waiting requests in order of arrival. A chunk
    ends at a multiple of `chunk_tokens` positions of its request or at its end, and is computed whole or not at all;
    only the chunk behind a cached prefix may end elsewhere, since the prefix is found when the step is submitted.

    A step is planned by `plan`, counted as done by `start_step` once it is submitted, and over with `finish_step`.
    What a step will have done is certain before it ran, except that a request may end early; the engine then removes
    it. So the next step is planned while the last one computes. The scheduler moves no pages: it is told how many are
    available.

    No request waits forever. At most `max_running` requests run, such that every decode and one whole chunk fit into
    each step: `max_running - 1 + chunk_tokens <= max_step_tokens`. So every decoding request and the oldest prompt
    advance in every step. Every running request is older than every waiting one; the newest is preempted first and
    goes back to the head of the queue, so the oldest request always keeps its pages and ends after at most one step
    for each of its chunks and tokens. Then the next one is the oldest, and a younger one never delays it.
    """

    def __init__(self, max_step_tokens: int, max_step_items: int, page_tokens: int) -> None:
        for name, value in (
            ("max_step_tokens", max_step_tokens),
            ("max_step_items", max_step_items),
            ("page_tokens", page_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.chunk_tokens = _choose_chunk(max_step_tokens, max_step_items, page_tokens)
        self.max_running = min(max_step_items, max_step_tokens - self.chunk_tokens + 1)
        self._max_step_tokens = max_step_tokens
        self._page_tokens = page_tokens
        self._running: dict[int, Request] = {}
        self._decodes: dict[int, StepItem] = {}
        self._prompts: dict[int, Request] = {}
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._is_admission_paused = False
        self._num_started = 0
        self._num_finished = 0

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

    def add(self, request_id: int, prompt_tokens: int, max_new_tokens: int, leader_id: int | None = None) -> None:
        """Queue a request of at least one prompt token and one new token.

        With a leader, the request waits until the leader's prompt is computed, to find it in the prefix cache.
        """
        self._waiting[request_id] = Request(
            request_id=request_id,
            prompt_tokens=prompt_tokens,
            max_known_tokens=prompt_tokens + max_new_tokens,
            leader_id=leader_id,
            known_tokens=prompt_tokens,
        )

    def remove(self, request_id: int) -> None:
        """Forget a request that finished or was given up; one that is not known changes nothing."""
        if self._running.pop(request_id, None) is None:
            self._waiting.pop(request_id, None)
        self._decodes.pop(request_id, None)
        self._prompts.pop(request_id, None)
        if not self._running:
            self._is_admission_paused = False

    def plan(self, available_pages: int) -> StepPlan:
        """Decide the next step, given how many pages are free or cached without an owner. Changes nothing.

        A request whose last token is being sampled is not planned again. The pages only matter while requests wait.
        """
        items = [*self._decodes.values()]
        budget_tokens = self._max_step_tokens - len(items)
        for request in self._prompts.values():
            count = request.next_chunk(self.chunk_tokens)
            if count <= budget_tokens:
                items.append(StepItem(request.request_id, count))
                budget_tokens -= count
        first_items: list[StepItem] = []
        if self._waiting and not self._is_admission_paused and len(self._running) < self.max_running:
            first_items = self._admit(budget_tokens, available_pages)
        return StepPlan(self._num_started + 1, (*items, *first_items), len(first_items))

    def start_step(self, plan: StepPlan, cached_tokens: Mapping[int, int]) -> int:
        """Count the plan just made as submitted and return the number of tokens it computes.

        `cached_tokens` has, by request id, what the prefix cache gave to requests among the `first_items` of the plan.
        It may leave less to compute than was planned.
        """
        self._num_started = plan.serial
        for request_id, _ in plan.first_items:
            request = self._waiting.pop(request_id)
            request.computed_tokens = cached_tokens.get(request_id, 0)
            self._running[request_id] = self._prompts[request_id] = request
        num_tokens = 0
        running, decodes = self._running, self._decodes
        for request_id, advance_tokens in plan.items:
            request = running[request_id]
            if request_id not in decodes:
                num_tokens += self._advance_prompt(request, advance_tokens)
                continue
            num_tokens += 1
            request.computed_tokens += 1
            request.known_tokens += 1
            if request.known_tokens == request.max_known_tokens:
                del decodes[request_id]
        return num_tokens

    def finish_step(self, plan: StepPlan) -> None:
        """Take in that a submitted step was collected; the queue may move again.

        Requests that ended in it are still to be removed.
        """
        self._num_finished = plan.serial
        self._is_admission_paused = False

    def preempt_newest(self) -> int | None:
        """Put the newest running request back at the head of the queue and return its id.

        Called when a planned step was refused for want of pages while none was in flight; plan again afterwards.
        Nothing is admitted until a step has finished. None means that the oldest request is alone and still does not
        fit: it never will.
        """
        if len(self._running) < 2:
            return None
        request_id, request = self._running.popitem()
        self._decodes.pop(request_id, None)
        self._prompts.pop(request_id, None)
        request.forget_pages()
        self._waiting[request_id] = request
        self._waiting.move_to_end(request_id, last=False)
        self._is_admission_paused = True
        return request_id

    def _advance_prompt(self, request: Request, advance_tokens: int) -> int:
        """Count a chunk as computed and return its tokens; behind the last known token a new one will be known."""
        request_id = request.request_id
        count = min(advance_tokens, request.known_tokens - request.computed_tokens)
        request.computed_tokens += count
        if request.prompt_step is None and request.computed_tokens >= request.prompt_tokens:
            request.prompt_step = self._num_started
        if request.computed_tokens == request.known_tokens:
            del self._prompts[request_id]
            request.known_tokens += 1
            if request.known_tokens < request.max_known_tokens:
                self._decodes[request_id] = StepItem(request_id, 1)
        return count

    def _admit(self, budget_tokens: int, available_pages: int) -> list[StepItem]:
        """The first chunks of the waiting requests that may start now, in order of arrival; none overtakes another.

        A request's known tokens must fit beside what the running requests still need. Cached pages are not counted in
        its favour, so the estimate errs towards waiting. With nothing running the first always may start.
        """
        items: list[StepItem] = []
        spare_pages = available_pages - sum(map(self._pages_to_grow, self._running.values()))
        for request in islice(self._waiting.values(), self.max_running - len(self._running)):
            count = request.next_chunk(self.chunk_tokens)
            is_alone = not self._running and not items
            has_pages = is_alone or self._pages_of(request.known_tokens) <= spare_pages
            if count > budget_tokens or not has_pages or self._waits_for_leader(request):
                break
            items.append(StepItem(request.request_id, count))
            budget_tokens -= count
            spare_pages -= self._pages_to_grow(request)
        return items

    def _waits_for_leader(self, request: Request) -> bool:
        """Whether the prompt that the request shares is still to come; a leader that left is not waited for."""
        if request.leader_id is None:
            return False
        if request.leader_id in self._waiting:
            return True
        leader = self._running.get(request.leader_id)
        return leader is not None and (leader.prompt_step is None or leader.prompt_step > self._num_finished)

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_tokens)

    def _pages_to_grow(self, request: Request) -> int:
        """Pages that a running request still takes for its known tokens, and one more for those to come."""
        return self._pages_of(request.known_tokens) - self._pages_of(request.computed_tokens) + 1


def _choose_chunk(max_step_tokens: int, max_step_items: int, page_tokens: int) -> int:
    """The largest whole number of pages that fits into a step beside a decode of every other request.

    Where the budget is too small for that, about half of it, so that chunks and decodes share the step; fewer requests
    then run at once. Below one page the chunk is not rounded to pages.
    """
    room = max_step_tokens - max_step_items
    if room < page_tokens:
        room = max(room + 1, (max_step_tokens + 1) // 2)
    return room - room % page_tokens or room
