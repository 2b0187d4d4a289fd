"""The scheduler: which requests advance in a step, and by how much."""

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace, merge
from itertools import takewhile

from glint.engine.key_queue import AgeEntry, KeyQueue, age_entry, drop
from glint.engine.scheduled_request import ScheduledRequest
from glint.engine.share import DEFAULT_SHARE, Share
from glint.engine.step_plan import StepItem, StepPlan

NO_DRAFTS: Mapping[int, int] = {}


class Scheduler:
    """Plans steps under a token budget, fair between keys, ahead of the results of the steps before.

    There are no phases: every request has known and computed tokens, and a step advances some requests. Requests that
    decode come first, then chunks of prompts, begun and waiting ones in one order. A chunk ends at a multiple of
    `chunk_tokens` positions of its request or at its end, and is computed whole or not at all; only the chunk behind a
    cached prefix may end elsewhere, since the prefix is found when the step is submitted.

    A step is planned by `plan`, counted as done by `start_step` once it is submitted, and over with `finish_step`.
    What a step will have done is certain before it ran, except that a request may end early; the engine then removes
    it. So the next step is planned while the last one computes. How many drafts are right is not certain: the next
    step is planned for all that the last one may make, and until `take_drafts` the last one counts as if none of those
    that it verifies were right. The scheduler moves no pages: it is told how many are available.

    Prompt tokens are shared between keys by weight. The clock of a key counts the prompt tokens computed for it,
    divided by its weight, and the key with the least clock goes first (start-time fair queueing). The clock of the
    key that went first in the last step is where a key begins that was idle or could not start anything, so nothing
    is saved up; of equals the one goes first that was not served for longest. While a key has prompts, another one
    gets at most two chunks more than its weight entitles it to: one that it began as the first, and one that filled
    what was left of a step. Decodes are not counted: each takes a slot, and slots are shared by themselves.

    Within a key the lower priority goes first, then the shorter prompt, then the older. A key that was served without
    its oldest prompt begins its next turn with the oldest, whatever its priority and size.

    At most `max_running` requests run, such that every decode, which verifies up to `max_drafts` drafts, all of them
    together `max_step_drafts`, and one whole chunk fit into each step: with d the lesser of `(max_running - 1) *
    max_drafts` and `max_step_drafts`, `max_running - 1 + d + chunk_tokens <= max_step_tokens`. Each key with
    requests is entitled to its share of these slots by weight, and to one at least. A key may take more while the free
    slots are enough for all that keys below their entitlement wait for. Where no slot is free and a key below its
    entitlement waits, a key above its own gives one back (`find_yielding`). Afterwards neither is on the other side of
    its entitlement, so two keys never take slots from each other in turns.

    A request starts where its known tokens fit into the pages beside what the running requests still need. While the
    oldest waiting request lacks pages, younger ones may run in as many pages as it would need, as long as something
    older runs. Once nothing older runs, its pages are kept for it. With nothing running it starts in any case. Where
    pages run out nonetheless, a step goes without drafts (`drop_drafts`). Where it needs more pages even so, the newest
    request of the key with the most running requests for its weight is preempted, and never the oldest that runs.

    No request waits forever, whatever arrives. Take the oldest of all, the one to which everything else is younger.
    If it waits, it is the oldest prompt of its key. Its key comes first again after every other key has had at most
    two chunks and its share of what this key had; its oldest prompt comes at the latest with the second of its turns.
    A slot comes free for it, since every running request ends, its key takes no further ones while it is above its
    entitlement and others wait, and is given one where it is below. Nothing that starts before it takes the pages
    that it needs, and what runs ends. Once it runs it is not preempted: not for pages, being the oldest, and not for
    a slot, since only the newest of several goes. It decodes in every step. So it ends, after a number of steps that
    depends on what was there before it and on the weights, not on what comes later; then the next one is the oldest.
    """

    def __init__(
        self,
        max_step_tokens: int,
        max_num_seqs: int,
        page_tokens: int,
        max_drafts: int = 0,
        max_step_drafts: int | None = None,
    ) -> None:
        for name, value in (
            ("max_step_tokens", max_step_tokens),
            ("max_num_seqs", max_num_seqs),
            ("page_tokens", page_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        drafts = max_num_seqs * max_drafts if max_step_drafts is None else max_step_drafts
        self.chunk_tokens = _choose_chunk(max_step_tokens, max_num_seqs + drafts, page_tokens)
        room = max_step_tokens - self.chunk_tokens
        self.max_running = min(max_num_seqs, max(room - drafts, room // (1 + max_drafts)) + 1)
        self._max_step_tokens = max_step_tokens
        self._page_tokens = page_tokens
        self._requests: dict[int, ScheduledRequest] = {}
        self._running: dict[int, ScheduledRequest] = {}
        self._decodes: dict[int, StepItem] = {}
        self._prompts: dict[int, ScheduledRequest] = {}
        self._waiting: list[AgeEntry] = []
        self._queues: dict[str | int, KeyQueue] = {}
        self._clock = 0.0
        self._is_admission_paused = False
        self._may_draft = True
        self._num_added = 0
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
        return bool(self._requests)

    def add(
        self,
        request_id: int,
        prompt_tokens: int,
        max_new_tokens: int,
        leader_id: int | None = None,
        share: Share = DEFAULT_SHARE,
        max_drafts: int = 0,
    ) -> None:
        """Queue a request of at least one prompt token and one new token.

        With a leader, the request waits until the leader's prompt is computed, to find it in the prefix cache. The
        weight of a key is the one that came with its last request.
        """
        self._num_added += 1
        request = ScheduledRequest(
            request_id=request_id,
            arrival=self._num_added,
            share=share,
            prompt_tokens=prompt_tokens,
            max_known_tokens=prompt_tokens + max_new_tokens,
            leader_id=leader_id,
            known_tokens=prompt_tokens,
            max_drafts=max_drafts,
        )
        if share.key not in self._queues:
            self._forget_idle_keys()
            self._queues[share.key] = KeyQueue(self._num_added, share.weight, self._clock)
        queue = self._queues[share.key]
        queue.weight = share.weight
        queue.num_requests += 1
        self._requests[request_id] = request
        self._wait(request, queue)

    def remove(self, request_id: int) -> None:
        """Forget a request that finished or was given up; one that is not known changes nothing."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        queue = self._queue_of(request)
        queue.num_requests -= 1
        if request_id in self._running:
            self._stop(request, queue)
        else:
            drop(self._waiting, age_entry(request))
            queue.discard(request, is_begun=False)
        if not self._running:
            self._is_admission_paused = False

    def plan(self, available_pages: int) -> StepPlan:
        """Decide the next step, given how many pages are free or cached without an owner. Changes nothing.

        A request whose last token is being sampled is not planned again. The pages only matter while requests wait.
        """
        decodes = [*self._decodes.values()]
        if not self._prompts and not self._waiting:
            return StepPlan(self._num_started + 1, tuple(decodes), 0, self._may_draft, len(decodes))
        room = _StepRoom(self._max_step_tokens - sum(item.advance_tokens for item in decodes))
        if self._waiting and not self._is_admission_paused and len(self._running) < self.max_running:
            self._open_queue(room, available_pages)
        turns = [
            (max(queue.clock, self._clock), queue.clock, queue.number, queue, self._candidates(queue, room))
            for queue in self._queues.values()
            if queue.begun or (queue.waiting and room.free_slots)
        ]
        heapify(turns)
        while turns:
            clock, raw, number, queue, candidates = turns[0]
            request = next(candidates, None)
            if request is None:
                heappop(turns)
                continue
            count = self._take(request, queue, room)
            heapreplace(turns, (clock + count / queue.weight, raw, number, queue, candidates))
        if room.first is not None and not self._running and not room.first_items:
            self._take(room.first, self._queue_of(room.first), room)
        items = (*decodes, *room.chunks, *room.first_items)
        return StepPlan(self._num_started + 1, items, len(room.first_items), self._may_draft, len(decodes))

    def start_step(
        self, plan: StepPlan, cached_tokens: Mapping[int, int], drafts: Mapping[int, int] = NO_DRAFTS
    ) -> int:
        """Count the plan just made as submitted and return the number of tokens it computes.

        `cached_tokens` has, by request id, what the prefix cache gave to requests among the `first_items` of the plan.
        It may leave less to compute than was planned. `drafts` has, by request id, the most drafts that this step
        makes for the next one.
        """
        self._num_started = plan.serial
        self._may_draft = True
        num_decodes = len(self._decodes)
        prompts = plan.items[num_decodes:]
        self._serve_keys(prompts)
        for request_id, _ in plan.first_items:
            request = self._requests[request_id]
            request.computed_tokens = cached_tokens.get(request_id, 0)
            self._begin(request)
        for request_id, advance_tokens in plan.items[:num_decodes]:
            request = self._running[request_id]
            request.computed_tokens += 1
            request.known_tokens += 1
            num_drafts = drafts.get(request_id, 0)
            if num_drafts or advance_tokens > 1 or request.known_tokens == request.max_known_tokens:
                self._plan_decode(request, num_drafts)
        decoded = sum(item.advance_tokens for item in plan.items[:num_decodes])
        return decoded + sum(self._advance_prompt(*item, drafts.get(item.request_id, 0)) for item in prompts)

    def take_drafts(self, request_id: int, new_tokens: int, num_drafts: int | None) -> None:
        """Take in what a collected step sampled for a request with drafts, and the drafts to verify in its next step.

        None says that its next step was submitted already. A request that is not known changes nothing.
        """
        request = self._running.get(request_id)
        if request is None:
            return
        request.computed_tokens += new_tokens - 1
        request.known_tokens += new_tokens - 1
        if num_drafts is not None:
            self._plan_decode(request, num_drafts)
        elif request_id in self._decodes:
            self._plan_decode(request, self._decodes[request_id].advance_tokens - 1)

    def finish_step(self, plan: StepPlan) -> None:
        """Take in that a submitted step was collected; the queue may move again.

        Requests that ended in it are still to be removed.
        """
        self._num_finished = plan.serial
        self._is_admission_paused = False

    def find_yielding(self) -> int | None:
        """The running request whose slot another key is entitled to, None where nobody must yield. Changes nothing.

        It is the newest of the key that has the most running requests for its weight.
        """
        if not self._waiting or len(self._running) < self.max_running or self._is_admission_paused:
            return None
        entitled = self._entitlements()
        if not any(queue.waiting and queue.num_running < entitled[queue.number] for queue in self._queues.values()):
            return None
        over = [
            request
            for request in self._running.values()
            if (queue := self._queue_of(request)).num_running > entitled[queue.number]
        ]
        return self._last_of(over)

    def preempt(self, request_id: int) -> None:
        """Put a running request back into the queue, without its pages. Called while no step is in flight."""
        request = self._running[request_id]
        queue = self._queue_of(request)
        self._stop(request, queue)
        request.forget_pages()
        self._wait(request, queue)

    def drop_drafts(self) -> bool:
        """Give up all drafts, and let the next step make none; False where it would have none in any case.

        Called when a planned step was refused for want of pages while none was in flight, before anything is preempted;
        plan again afterwards.
        """
        if not self._may_draft or not any(request.max_drafts for request in self._requests.values()):
            return False
        self._may_draft = False
        self._decodes = {request_id: StepItem(request_id, 1) for request_id in self._decodes}
        return True

    def preempt_for_pages(self) -> int | None:
        """Preempt the request that gives its pages where they have run out, and return its id.

        Called when a planned step was refused for want of pages while none was in flight, and there are no drafts to
        drop; plan again afterwards.
        Nothing is admitted until a step has finished. None means that a single request runs and still does not fit:
        it never will.
        """
        oldest = min(self._running.values(), key=age_entry, default=None)
        request_id = self._last_of([request for request in self._running.values() if request is not oldest])
        if request_id is not None:
            self.preempt(request_id)
            self._is_admission_paused = True
        return request_id

    def _queue_of(self, request: ScheduledRequest) -> KeyQueue:
        return self._queues[request.share.key]

    def _last_of(self, requests: list[ScheduledRequest]) -> int | None:
        """The request that yields first: the newest of the key with the most running requests for its weight."""
        if not requests:
            return None

        def rank(request: ScheduledRequest) -> tuple[float, int]:
            queue = self._queue_of(request)
            return queue.num_running / queue.weight, request.arrival

        return max(requests, key=rank).request_id

    def _forget_idle_keys(self) -> None:
        """Drop the keys without requests whose clocks say nothing any more."""
        for key, queue in list(self._queues.items()):
            if not queue.num_requests and queue.clock <= self._clock:
                del self._queues[key]

    def _wait(self, request: ScheduledRequest, queue: KeyQueue) -> None:
        insort(self._waiting, age_entry(request))
        queue.add(request)

    def _begin(self, request: ScheduledRequest) -> None:
        """Give a waiting request its slot."""
        queue = self._queue_of(request)
        drop(self._waiting, age_entry(request))
        queue.begin(request)
        queue.num_running += 1
        self._running[request.request_id] = self._prompts[request.request_id] = request

    def _stop(self, request: ScheduledRequest, queue: KeyQueue) -> None:
        """Take a running request's slot."""
        del self._running[request.request_id]
        queue.num_running -= 1
        self._decodes.pop(request.request_id, None)
        if self._prompts.pop(request.request_id, None) is not None:
            queue.discard(request, is_begun=True)

    def _entitlements(self) -> dict[int, int]:
        """How many slots each key with requests may claim, by the number of its queue."""
        active = [queue for queue in self._queues.values() if queue.num_requests]
        total_weight = sum(queue.weight for queue in active)
        return {queue.number: max(1, self.max_running * queue.weight // total_weight) for queue in active}

    def _open_queue(self, room: "_StepRoom", available_pages: int) -> None:
        """Find the slots and pages that waiting requests may take in a step."""
        room.free_slots = self.max_running - len(self._running)
        room.entitled = self._entitlements()
        room.owed_slots = sum(
            max(0, min(len(queue.waiting), room.entitled[queue.number] - queue.num_running))
            for queue in self._queues.values()
            if queue.waiting
        )
        page = self._page_tokens
        room.spare_pages = available_pages - sum(
            -(-request.paged_tokens // page) + -request.computed_tokens // page + 1
            for request in self._running.values()
        )
        if self._running and room.spare_pages < 1:
            room.free_slots = 0
            return
        first = next((request for _, request in self._waiting if not self._waits_for_leader(request)), None)
        if first is None:
            return
        needed_pages = self._pages_of(first)
        younger = [request for request in self._running.values() if request.arrival > first.arrival]
        if len(younger) == len(self._running):
            room.first = first
            room.overtaking_pages = room.spare_pages - needed_pages - 1
        elif needed_pages > room.spare_pages:
            room.first = first
            room.overtaking_pages = needed_pages - sum(self._pages_of(request) for request in younger)

    def _serve_keys(self, prompts: Sequence[StepItem]) -> None:
        """Count a turn for every key with prompt tokens in a step, and move the common clock to the first of them."""
        served: dict[int, KeyQueue] = {}
        with_oldest: set[int] = set()
        for request_id, _ in prompts:
            request = self._requests[request_id]
            queue = self._queue_of(request)
            served[queue.number] = queue
            if queue.oldest is request:
                with_oldest.add(queue.number)
        if not served:
            return
        self._clock = max(self._clock, min(queue.clock for queue in served.values()))
        for number, queue in served.items():
            queue.clock = max(queue.clock, self._clock)
            queue.owes_oldest = number not in with_oldest

    def _plan_decode(self, request: ScheduledRequest, num_drafts: int) -> None:
        """Let the next step sample for a request that has room, and verify so many drafts as far as it has."""
        left = request.max_known_tokens - request.known_tokens
        if left > 0:
            self._decodes[request.request_id] = StepItem(request.request_id, min(1 + num_drafts, left))
        else:
            self._decodes.pop(request.request_id, None)

    def _advance_prompt(self, request_id: int, advance_tokens: int, num_drafts: int) -> int:
        """Count a chunk as computed and return its tokens; behind the last known token a new one will be known."""
        request = self._running[request_id]
        queue = self._queue_of(request)
        count = min(advance_tokens, request.known_tokens - request.computed_tokens)
        request.computed_tokens += count
        queue.clock += count / queue.weight
        if request.prompt_step is None and request.computed_tokens >= request.prompt_tokens:
            request.prompt_step = self._num_started
        if request.computed_tokens == request.known_tokens:
            del self._prompts[request_id]
            queue.discard(request, is_begun=True)
            request.known_tokens += 1
            self._plan_decode(request, num_drafts)
        return count

    def _candidates(self, queue: KeyQueue, room: "_StepRoom") -> Iterator[ScheduledRequest]:
        """The requests of a key whose next chunk fits into what is left of the step, in the order of the key.

        Of the waiting ones none overtakes a better one that does not fit, except one that waits for its leader; the
        oldest is tried in any case. A key that owes its oldest a turn has none where too little is left of the step:
        it keeps its clock and comes first in a later one.
        """
        oldest, is_taken = queue.oldest, False
        if queue.owes_oldest:
            if oldest.next_chunk(self.chunk_tokens) > room.budget_tokens:
                return
            if self._fits(oldest, queue, room):
                is_taken = True
                yield oldest
        ready = (entry for entry in queue.waiting if not self._waits_for_leader(entry[-1]))
        starting = takewhile(lambda entry: self._fits(entry[-1], queue, room), ready)
        for *_, request in merge(queue.begun, starting) if queue.begun else starting:
            if not (is_taken and request is oldest) and self._fits(request, queue, room):
                is_taken = is_taken or request is oldest
                yield request
        if not is_taken and self._fits(oldest, queue, room):
            yield oldest

    def _fits(self, request: ScheduledRequest, queue: KeyQueue, room: "_StepRoom") -> bool:
        """Whether the next chunk fits into what is left of a step, and whether a waiting request may start in it.

        Cached pages are not counted in its favour, so the estimate errs towards waiting.
        """
        if request.next_chunk(self.chunk_tokens) > room.budget_tokens:
            return False
        if request.request_id in self._running:
            return True
        if not room.has_slot(queue) or self._waits_for_leader(request):
            return False
        pages = self._pages_of(request)
        is_overtaking = room.first is not None and request.arrival > room.first.arrival
        return pages <= room.spare_pages and (not is_overtaking or pages <= room.overtaking_pages)

    def _take(self, request: ScheduledRequest, queue: KeyQueue, room: "_StepRoom") -> int:
        """Put the next chunk of a request into a step and return its tokens."""
        count = request.next_chunk(self.chunk_tokens)
        room.budget_tokens -= count
        if request.request_id in self._running:
            room.chunks.append(StepItem(request.request_id, count))
        else:
            room.first_items.append(StepItem(request.request_id, count))
            room.take_slot(queue)
            if request is room.first:
                room.first = None
            room.spare_pages -= self._pages_of(request) + 1
            room.overtaking_pages -= self._pages_of(request)
        return count

    def _waits_for_leader(self, request: ScheduledRequest) -> bool:
        """Whether the prompt that the request shares is still to come; a leader that left is not waited for."""
        leader = None if request.leader_id is None else self._requests.get(request.leader_id)
        return leader is not None and (leader.prompt_step is None or leader.prompt_step > self._num_finished)

    def _pages_of(self, request: ScheduledRequest) -> int:
        return -(-request.paged_tokens // self._page_tokens)


@dataclass(slots=True)
class _StepRoom:
    """What is left of a step while it is planned.

    `entitled` and `started` have slots by the number of a queue: those a key may claim, and those it took in this
    step; `owed_slots` are claimed by keys that wait below their entitlement. `first` is the oldest waiting request
    where it lacks pages or nothing older runs, `overtaking_pages` what younger ones may take.
    """

    budget_tokens: int
    free_slots: int = 0
    owed_slots: int = 0
    spare_pages: int = 0
    overtaking_pages: int = 0
    first: ScheduledRequest | None = None
    entitled: dict[int, int] = field(default_factory=dict)
    started: dict[int, int] = field(default_factory=dict)
    chunks: list[StepItem] = field(default_factory=list)
    first_items: list[StepItem] = field(default_factory=list)

    def is_owed(self, queue: KeyQueue) -> bool:
        """Whether a key is below its entitlement of slots."""
        return queue.num_running + self.started.get(queue.number, 0) < self.entitled[queue.number]

    def has_slot(self, queue: KeyQueue) -> bool:
        """Whether a key may take one more slot."""
        return self.free_slots > 0 and (self.is_owed(queue) or self.free_slots > self.owed_slots)

    def take_slot(self, queue: KeyQueue) -> None:
        """Give a key one more slot."""
        self.owed_slots -= self.is_owed(queue)
        self.free_slots -= 1
        self.started[queue.number] = self.started.get(queue.number, 0) + 1


def _choose_chunk(max_step_tokens: int, max_num_seqs: int, page_tokens: int) -> int:
    """The largest whole number of pages that fits into a step beside a decode of every other request.

    Where the budget is too small for that, about half of it, so that chunks and decodes share the step; fewer requests
    then run at once. Below one page the chunk is not rounded to pages.
    """
    room = max_step_tokens - max_num_seqs
    if room < page_tokens:
        room = max(room + 1, (max_step_tokens + 1) // 2)
    return room - room % page_tokens or room
