"""The scheduler against real page arithmetic: budget, order, chunks, preemption, and that everything ends."""

import dataclasses
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glint.scheduling.plan import Progress, StepItem, StepPlan
from glint.scheduling.scheduler import Scheduler


@dataclass
class Work:
    """One request as the page arithmetic sees it."""

    prompt_tokens: int
    max_new_tokens: int
    computed_tokens: int = 0
    new_tokens: int = 0
    times_preempted: int = 0

    @property
    def known_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens


@dataclass
class Pages:
    """Counts pages the way the engine promises to: whole pages, all or nothing, given back on preemption."""

    num_pages: int
    page_tokens: int
    works: dict[int, Work]
    first_scheduled: list[int] = field(default_factory=list)

    def pages_of(self, num_tokens: int) -> int:
        return (num_tokens + self.page_tokens - 1) // self.page_tokens

    @property
    def available_pages(self) -> int:
        return self.num_pages - sum(self.pages_of(work.computed_tokens) for work in self.works.values())

    def fits(self, plan: StepPlan) -> bool:
        taken = 0
        for item in plan.items:
            before = self.works[item.request_id].computed_tokens
            taken += self.pages_of(before + item.advance_tokens) - self.pages_of(before)
        return taken <= self.available_pages

    def run(self, plan: StepPlan) -> list[Progress]:
        results = []
        for item in plan.items:
            work = self.works[item.request_id]
            if item.request_id not in self.first_scheduled:
                self.first_scheduled.append(item.request_id)
            assert 0 < item.advance_tokens <= work.known_tokens - work.computed_tokens
            work.computed_tokens += item.advance_tokens
            sampled = int(work.computed_tokens == work.known_tokens)
            work.new_tokens += sampled
            results.append(Progress(item.request_id, work.computed_tokens, sampled))
        return results

    def free_finished(self) -> list[int]:
        finished = [key for key, work in self.works.items() if work.new_tokens == work.max_new_tokens]
        for request_id in finished:
            self.works[request_id].computed_tokens = 0
        return finished

    def preempt(self, request_id: int) -> None:
        self.works[request_id].computed_tokens = 0
        self.works[request_id].times_preempted += 1


def next_plan(scheduler: Scheduler, pages: Pages) -> StepPlan:
    """Plan, preempting while the step does not fit."""
    plan = scheduler.plan(pages.available_pages)
    while not pages.fits(plan):
        request_id = scheduler.preempt_newest()
        assert request_id is not None, "a request that fits alone was given up"
        pages.preempt(request_id)
        plan = scheduler.plan(pages.available_pages)
    return plan


def run_step(scheduler: Scheduler, pages: Pages) -> StepPlan:
    plan = next_plan(scheduler, pages)
    assert plan.items, "work is left but nothing was planned"
    scheduler.apply(pages.run(plan))
    for request_id in pages.free_finished():
        scheduler.remove(request_id)
    return plan


def run_to_end(scheduler: Scheduler, pages: Pages) -> list[StepPlan]:
    plans = []
    while scheduler.has_work:
        plans.append(run_step(scheduler, pages))
    return plans


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Scheduler, Pages, int, int]:
    page_tokens = draw(st.integers(1, 8))
    num_pages = draw(st.integers(1, 24))
    capacity = page_tokens * num_pages
    works = {}
    for request_id in range(draw(st.integers(1, 10))):
        prompt_tokens = draw(st.integers(1, capacity))
        works[request_id] = Work(prompt_tokens, draw(st.integers(1, capacity - prompt_tokens + 1)))
    max_step_tokens = draw(st.integers(1, 40))
    max_step_items = draw(st.integers(1, 8))
    scheduler = Scheduler(max_step_tokens, max_step_items, page_tokens)
    for request_id, work in works.items():
        scheduler.add(request_id, work.prompt_tokens)
    return scheduler, Pages(num_pages, page_tokens, works), max_step_tokens, max_step_items


@settings(deadline=None)
@given(workloads())
def test_every_request_finishes_within_the_limits(workload: tuple[Scheduler, Pages, int, int]) -> None:
    scheduler, pages, max_step_tokens, max_step_items = workload
    for plan in run_to_end(scheduler, pages):
        assert plan.num_tokens <= max_step_tokens
        assert len(plan.items) <= max_step_items
        assert len({item.request_id for item in plan.items}) == len(plan.items)
    assert all(work.new_tokens == work.max_new_tokens for work in pages.works.values())
    assert pages.available_pages == pages.num_pages
    assert pages.first_scheduled == sorted(pages.works)


@settings(deadline=None)
@given(workloads(), st.integers(0, 5))
def test_preempting_at_any_time_changes_no_count(
    workload: tuple[Scheduler, Pages, int, int], steps_between: int
) -> None:
    scheduler, pages, _, _ = workload
    preempted_at = {step * (steps_between + 1) for step in range(1, 4)}
    step = 0
    while scheduler.has_work:
        run_step(scheduler, pages)
        step += 1
        if step in preempted_at and (request_id := scheduler.preempt_newest()) is not None:
            pages.preempt(request_id)
    assert all(work.new_tokens == work.max_new_tokens for work in pages.works.values())
    assert pages.first_scheduled == sorted(pages.works)


@settings(deadline=None)
@given(workloads())
def test_the_oldest_request_is_never_preempted(workload: tuple[Scheduler, Pages, int, int]) -> None:
    scheduler, pages, _, _ = workload
    run_to_end(scheduler, pages)
    assert pages.works[0].times_preempted == 0


def test_decodes_come_first_then_chunks_then_new_requests() -> None:
    scheduler = Scheduler(max_step_tokens=8, max_step_items=8, page_tokens=4)
    scheduler.add(0, 20)
    assert scheduler.plan(100).items == (StepItem(0, 8),)
    scheduler.apply([Progress(0, 8, 0)])
    assert scheduler.plan(100).items == (StepItem(0, 8),)
    scheduler.apply([Progress(0, 16, 0)])
    scheduler.add(1, 30)
    assert scheduler.plan(100).items == (StepItem(0, 4), StepItem(1, 4))
    scheduler.apply([Progress(0, 20, 1), Progress(1, 4, 0)])
    scheduler.add(2, 1)
    assert scheduler.plan(100).items == (StepItem(0, 1), StepItem(1, 7))


def test_a_younger_decode_goes_before_an_older_prompt() -> None:
    scheduler = Scheduler(max_step_tokens=8, max_step_items=8, page_tokens=4)
    scheduler.add(0, 7)
    scheduler.add(1, 1)
    assert scheduler.plan(100).items == (StepItem(0, 7), StepItem(1, 1))
    scheduler.apply([Progress(0, 5, 0), Progress(1, 1, 1)])
    assert scheduler.plan(100).items == (StepItem(1, 1), StepItem(0, 2))


def test_a_cached_prefix_shortens_what_is_left() -> None:
    scheduler = Scheduler(max_step_tokens=8, max_step_items=8, page_tokens=4)
    scheduler.add(0, 100)
    assert scheduler.plan(100).items == (StepItem(0, 8),)
    scheduler.apply([Progress(0, 96, 0)])
    assert scheduler.plan(100).items == (StepItem(0, 4),)


def test_a_waiting_request_starts_only_when_its_tokens_fit() -> None:
    scheduler = Scheduler(max_step_tokens=64, max_step_items=8, page_tokens=4)
    scheduler.add(0, 8)
    scheduler.plan(5)
    scheduler.apply([Progress(0, 8, 1)])
    scheduler.add(1, 8)
    assert scheduler.plan(3).items == (StepItem(0, 1),)
    assert scheduler.plan(4).items == (StepItem(0, 1), StepItem(1, 8))


def test_a_follower_waits_for_the_prompt_it_shares() -> None:
    scheduler = Scheduler(max_step_tokens=8, max_step_items=8, page_tokens=4)
    scheduler.add(0, 10)
    scheduler.add(1, 10, leader_id=0)
    assert scheduler.plan(100).items == (StepItem(0, 8),)
    scheduler.apply([Progress(0, 8, 0)])
    assert scheduler.plan(100).items == (StepItem(0, 2),)
    scheduler.apply([Progress(0, 10, 1)])
    assert scheduler.plan(100).items == (StepItem(0, 1), StepItem(1, 7))


def test_a_follower_does_not_wait_for_a_leader_that_left() -> None:
    scheduler = Scheduler(max_step_tokens=8, max_step_items=8, page_tokens=4)
    scheduler.add(0, 10)
    scheduler.add(1, 5, leader_id=0)
    scheduler.plan(100)
    scheduler.remove(0)
    assert scheduler.plan(100).items == (StepItem(1, 5),)


def test_preempted_requests_return_in_order_of_arrival() -> None:
    scheduler = Scheduler(max_step_tokens=64, max_step_items=8, page_tokens=4)
    for request_id in range(4):
        scheduler.add(request_id, 4)
    scheduler.plan(100)
    scheduler.apply([Progress(request_id, 4, 1) for request_id in range(4)])
    assert scheduler.preempt_newest() == 3
    assert scheduler.preempt_newest() == 2
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    assert scheduler.plan(100).items == (StepItem(0, 1), StepItem(1, 1))
    scheduler.apply([Progress(0, 5, 1), Progress(1, 5, 1)])
    assert scheduler.plan(100).items == (StepItem(0, 1), StepItem(1, 1), StepItem(2, 5), StepItem(3, 5))


def test_a_request_that_can_never_fit_is_given_up() -> None:
    scheduler = Scheduler(max_step_tokens=64, max_step_items=8, page_tokens=4)
    pages = Pages(num_pages=2, page_tokens=4, works={0: Work(9, 1)})
    scheduler.add(0, 9)
    assert not pages.fits(scheduler.plan(pages.available_pages))
    assert scheduler.preempt_newest() is None
    scheduler.remove(0)
    assert not scheduler.has_work


def test_removing_works_for_running_waiting_and_unknown_requests() -> None:
    scheduler = Scheduler(max_step_tokens=4, max_step_items=1, page_tokens=4)
    scheduler.add(0, 4)
    scheduler.add(1, 4)
    scheduler.plan(100)
    scheduler.remove(1)
    scheduler.remove(7)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)
    scheduler.remove(0)
    assert scheduler.plan(100).items == ()


def test_a_plan_is_plain_data() -> None:
    scheduler = Scheduler(max_step_tokens=4, max_step_items=1, page_tokens=4)
    scheduler.add(0, 9)
    plan = scheduler.plan(100)
    copy = dataclasses.replace(plan)
    scheduler.apply([Progress(0, 4, 0)])
    scheduler.plan(100)
    assert plan == copy == StepPlan((StepItem(0, 4),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.items = ()


@pytest.mark.parametrize("name", ["max_step_tokens", "max_step_items", "page_tokens"])
def test_limits_below_one_are_refused(name: str) -> None:
    limits = {"max_step_tokens": 1, "max_step_items": 1, "page_tokens": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Scheduler(**limits)
