"""The scheduler against real page arithmetic: budget, order, chunks, preemption, and steps planned ahead."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glint.engine.scheduler import Scheduler
from glint.engine.step_plan import StepItem, StepPlan
from tests.pure.step_machine import Machine, Work


@st.composite
def machines(draw: st.DrawFn, max_depth: int = 2) -> Machine:
    page_tokens = draw(st.integers(1, 8))
    num_pages = draw(st.integers(1, 24))
    capacity = page_tokens * num_pages
    works = {}
    arrives_at = 0
    for request_id in range(draw(st.integers(1, 10))):
        prompt_tokens = draw(st.integers(1, capacity))
        max_new_tokens = draw(st.integers(1, capacity - prompt_tokens + 1))
        stops_after = draw(st.integers(1, max_new_tokens))
        prefix_tokens = draw(st.sampled_from((0, 0, capacity // 2, capacity)))
        arrives_at += draw(st.sampled_from((0, 0, 1, 5)))
        works[request_id] = Work(prompt_tokens, max_new_tokens, stops_after, prefix_tokens, arrives_at)
    scheduler = Scheduler(draw(st.integers(1, 40)), draw(st.integers(1, 8)), page_tokens)
    return Machine(scheduler, num_pages, page_tokens, works, depth=draw(st.integers(1, max_depth)))


@given(machines())
def test_every_request_finishes_within_the_limits(machine: Machine) -> None:
    machine.run_to_end()
    for plan in machine.plans:
        assert plan.num_tokens <= machine.scheduler._max_step_tokens
        assert len(plan.items) <= machine.scheduler.max_running
        assert len({item.request_id for item in plan.items}) == len(plan.items)
    assert all(work.is_finished for work in machine.works.values())
    assert machine.available_pages == machine.num_pages
    assert sorted(machine.first_scheduled) == sorted(machine.works)


@given(machines())
def test_chunks_end_where_the_request_says(machine: Machine) -> None:
    for work in machine.works.values():
        work.prefix_tokens = 0
    machine.run_to_end()
    chunk_tokens = machine.scheduler.chunk_tokens
    for request_id, ends in machine.chunk_ends.items():
        prompt_tokens = machine.works[request_id].prompt_tokens
        assert all(end % chunk_tokens == 0 for end in ends if end < prompt_tokens)


@given(machines())
def test_the_oldest_request_is_never_preempted(machine: Machine) -> None:
    machine.run_to_end()
    assert machine.works[0].times_preempted == 0


@given(machines(max_depth=1), st.integers(0, 5))
def test_preempting_at_any_time_changes_no_count(machine: Machine, steps_between: int) -> None:
    preempted_at = {step * (steps_between + 1) for step in range(1, 4)}
    for request_id in machine.works:
        machine.add(request_id)
    while machine.scheduler.has_work:
        machine.step()
        if machine.num_collected in preempted_at and machine.scheduler.num_running > 1:
            machine.preempt()
    assert all(work.is_finished for work in machine.works.values())


@pytest.mark.parametrize(
    ("max_step_tokens", "max_num_seqs", "page_tokens", "chunk_tokens", "max_running"),
    [
        (512, 64, 16, 448, 64),
        (500, 64, 16, 432, 64),
        (512, 64, 64, 448, 64),
        (100, 20, 16, 80, 20),
        (8192, 256, 64, 7936, 256),
        (64, 64, 16, 32, 33),
        (20, 8, 16, 13, 8),
        (7, 64, 16, 4, 4),
        (4, 1, 16, 4, 1),
        (2, 8, 16, 1, 2),
        (1, 64, 16, 1, 1),
    ],
)
def test_a_chunk_fits_beside_all_decodes(
    max_step_tokens: int, max_num_seqs: int, page_tokens: int, chunk_tokens: int, max_running: int
) -> None:
    scheduler = Scheduler(max_step_tokens, max_num_seqs, page_tokens)
    assert (scheduler.chunk_tokens, scheduler.max_running) == (chunk_tokens, max_running)
    assert max_running - 1 + chunk_tokens <= max_step_tokens


def small_scheduler(max_step_tokens: int = 12, max_num_seqs: int = 4) -> Scheduler:
    """Pages of 4 tokens; with the defaults chunks of 8 tokens."""
    return Scheduler(max_step_tokens, max_num_seqs, page_tokens=4)


def run_plan(scheduler: Scheduler, available_pages: int = 100, cached: dict[int, int] | None = None) -> StepPlan:
    """Plan a step and let it run to its end."""
    plan = scheduler.plan(available_pages)
    scheduler.start_step(plan, cached or {})
    scheduler.finish_step(plan)
    return plan


def test_decodes_come_first_then_chunks_then_new_requests() -> None:
    scheduler = small_scheduler()
    scheduler.add(0, 20, 9)
    assert run_plan(scheduler).items == (StepItem(0, 8),)
    assert run_plan(scheduler).items == (StepItem(0, 8),)
    scheduler.add(1, 30, 9)
    assert run_plan(scheduler).items == (StepItem(0, 4), StepItem(1, 8))
    scheduler.add(2, 3, 9)
    assert run_plan(scheduler).items == (StepItem(0, 1), StepItem(1, 8), StepItem(2, 3))
    assert run_plan(scheduler).items == (StepItem(0, 1), StepItem(2, 1), StepItem(1, 8))


def test_a_chunk_is_computed_whole_or_not_at_all() -> None:
    scheduler = small_scheduler()
    for request_id in range(3):
        scheduler.add(request_id, 7, 9)
    assert run_plan(scheduler).items == (StepItem(0, 7),)
    assert run_plan(scheduler).items == (StepItem(0, 1), StepItem(1, 7))
    assert run_plan(scheduler).items == (StepItem(0, 1), StepItem(1, 1), StepItem(2, 7))


def test_a_short_chunk_may_fill_what_an_older_one_leaves() -> None:
    scheduler = small_scheduler(max_step_tokens=20, max_num_seqs=8)
    assert scheduler.chunk_tokens == 12
    scheduler.add(0, 30, 9)
    scheduler.add(1, 31, 9)
    assert run_plan(scheduler).items == (StepItem(0, 12),)
    assert run_plan(scheduler).items == (StepItem(0, 12),)
    assert run_plan(scheduler).items == (StepItem(0, 6), StepItem(1, 12))
    assert run_plan(scheduler).items == (StepItem(0, 1), StepItem(1, 12))


def test_a_step_is_planned_on_what_the_one_in_flight_will_have_done() -> None:
    scheduler = small_scheduler()
    scheduler.add(0, 10, 3)
    plans = []
    for _ in range(4):
        plans.append(scheduler.plan(100))
        scheduler.start_step(plans[-1], {})
    assert [plan.items for plan in plans] == [
        (StepItem(0, 8),),
        (StepItem(0, 2),),
        (StepItem(0, 1),),
        (StepItem(0, 1),),
    ]
    assert scheduler.plan(100).items == (), "a request was planned past its last token"
    assert scheduler.num_running == 1


def test_a_cached_prefix_shortens_what_is_left() -> None:
    scheduler = small_scheduler()
    scheduler.add(0, 100, 9)
    plan = scheduler.plan(100)
    assert (plan.items, plan.num_first) == ((StepItem(0, 8),), 1)
    assert scheduler.start_step(plan, {0: 84}) == 8
    plan = scheduler.plan(100)
    assert (plan.items, plan.num_first) == ((StepItem(0, 4),), 0)
    assert scheduler.start_step(plan, {}) == 4
    plan = scheduler.plan(100)
    assert plan.items == (StepItem(0, 4),)
    assert scheduler.start_step(plan, {}) == 4
    assert scheduler.plan(100).items == (StepItem(0, 1),)


def test_a_begun_prompt_waits_where_an_older_one_needs_the_budget() -> None:
    scheduler = small_scheduler()
    scheduler.add(0, 100, 9)
    scheduler.add(1, 130, 9)
    assert run_plan(scheduler, cached={0: 4}).items == (StepItem(0, 8),)
    assert run_plan(scheduler).items == (StepItem(0, 4), StepItem(1, 8))
    assert run_plan(scheduler).items == (StepItem(0, 8),)


@pytest.mark.parametrize(("prompt_tokens", "fits"), [(7, True), (8, False)])
def test_prompts_fill_what_the_decodes_leave_of_the_budget(prompt_tokens: int, fits: bool) -> None:
    scheduler = small_scheduler(max_step_tokens=20, max_num_seqs=8)
    scheduler.add(0, 3, 9)
    run_plan(scheduler)
    scheduler.add(1, 100, 9)
    scheduler.add(2, prompt_tokens, 9)
    last = (StepItem(1, 12),) if fits else ()
    assert run_plan(scheduler).items == (StepItem(0, 1), StepItem(2, prompt_tokens), *last)


@pytest.mark.parametrize(
    ("prompt_tokens", "items"), [(56, (StepItem(0, 12), StepItem(1, 8))), (57, (StepItem(0, 12),))]
)
def test_chunks_of_two_prompts_fill_the_budget_and_no_more(prompt_tokens: int, items: tuple[StepItem, ...]) -> None:
    scheduler = small_scheduler(max_step_tokens=20, max_num_seqs=8)
    scheduler.add(0, 44, 9)
    scheduler.add(1, prompt_tokens, 9)
    assert run_plan(scheduler, cached={0: 8}).items == (StepItem(0, 12),)
    assert run_plan(scheduler, cached={1: 36}).items == (StepItem(0, 4), StepItem(1, 12))
    assert run_plan(scheduler).items == items


def test_no_more_requests_start_than_may_run() -> None:
    scheduler = small_scheduler()
    for request_id in range(3):
        scheduler.add(request_id, 2, 9)
    run_plan(scheduler)
    assert scheduler.num_running == 3 == scheduler.max_running - 1
    for request_id in (3, 4):
        scheduler.add(request_id, 1, 9)
    assert run_plan(scheduler).first_items == (StepItem(3, 1),)
    assert (scheduler.num_running, scheduler.num_waiting) == (4, 1)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_a_request_whose_last_token_is_being_sampled_is_not_planned_again(max_new_tokens: int) -> None:
    scheduler = small_scheduler()
    scheduler.add(0, 5, max_new_tokens)
    plans = []
    for _ in range(5):
        plan = scheduler.plan(100)
        scheduler.start_step(plan, {})
        plans.append(plan.items)
    decodes = [(StepItem(0, 1),)] * (max_new_tokens - 1)
    assert plans == [(StepItem(0, 5),), *decodes, *[()] * (5 - max_new_tokens)]


def test_the_only_running_request_is_never_preempted() -> None:
    scheduler = small_scheduler()
    scheduler.add(0, 4, 9)
    run_plan(scheduler)
    scheduler.add(1, 4, 9)
    assert scheduler.preempt_for_pages() is None
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


def test_a_prefix_may_leave_less_than_the_chunk() -> None:
    scheduler = small_scheduler()
    scheduler.add(0, 30, 9)
    plan = scheduler.plan(100)
    assert plan.items == (StepItem(0, 8),)
    assert scheduler.start_step(plan, {0: 28}) == 2
    assert scheduler.plan(100).items == (StepItem(0, 1),)


def test_a_waiting_request_starts_only_when_its_tokens_fit() -> None:
    scheduler = small_scheduler(max_step_tokens=64)
    scheduler.add(0, 8, 9)
    run_plan(scheduler, available_pages=5)
    scheduler.add(1, 8, 9)
    assert scheduler.plan(3).items == (StepItem(0, 1),)
    assert scheduler.plan(4).items == (StepItem(0, 1), StepItem(1, 8))


def test_a_follower_waits_until_the_prompt_it_shares_was_collected() -> None:
    scheduler = small_scheduler(max_step_tokens=40)
    scheduler.add(0, 10, 9)
    scheduler.add(1, 10, 9, leader_id=0)
    first = scheduler.plan(100)
    assert first.items == (StepItem(0, 10),)
    scheduler.start_step(first, {})
    second = scheduler.plan(100)
    assert second.items == (StepItem(0, 1),)
    scheduler.start_step(second, {})
    scheduler.finish_step(first)
    assert scheduler.plan(100).items == (StepItem(0, 1), StepItem(1, 10))


def test_a_follower_does_not_wait_for_a_leader_that_left() -> None:
    scheduler = small_scheduler()
    scheduler.add(0, 10, 9)
    scheduler.add(1, 5, 9, leader_id=0)
    scheduler.start_step(scheduler.plan(100), {})
    scheduler.remove(0)
    assert scheduler.plan(100).items == (StepItem(1, 5),)


def test_preempted_requests_return_in_order_of_arrival() -> None:
    scheduler = small_scheduler(max_step_tokens=64, max_num_seqs=8)
    for request_id in range(4):
        scheduler.add(request_id, 4, 9)
    run_plan(scheduler)
    assert scheduler.preempt_for_pages() == 3
    assert scheduler.preempt_for_pages() == 2
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)
    assert run_plan(scheduler).items == (StepItem(0, 1), StepItem(1, 1))
    plan = scheduler.plan(100)
    assert plan.items == (StepItem(0, 1), StepItem(1, 1), StepItem(2, 5), StepItem(3, 5))
    assert plan.first_items == (StepItem(2, 5), StepItem(3, 5))


def test_a_request_that_can_never_fit_is_given_up() -> None:
    scheduler = small_scheduler(max_step_tokens=64)
    machine = Machine(scheduler, num_pages=2, page_tokens=4, works={0: Work(9, 1, 1)})
    machine.add(0)
    assert not machine.submit(scheduler.plan(machine.available_pages))
    assert scheduler.preempt_for_pages() is None
    scheduler.remove(0)
    assert not scheduler.has_work


def test_removing_works_for_running_waiting_and_unknown_requests() -> None:
    scheduler = small_scheduler(max_step_tokens=4, max_num_seqs=1)
    scheduler.add(0, 4, 9)
    scheduler.add(1, 4, 9)
    run_plan(scheduler)
    scheduler.remove(1)
    scheduler.remove(7)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)
    scheduler.remove(0)
    assert scheduler.plan(100).items == ()


def test_a_plan_is_plain_data() -> None:
    scheduler = small_scheduler()
    scheduler.add(0, 9, 9)
    plan = scheduler.plan(100)
    copy = dataclasses.replace(plan)
    scheduler.start_step(plan, {})
    scheduler.plan(100)
    assert plan == copy == StepPlan(serial=1, items=(StepItem(0, 8),), num_first=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.items = ()


@pytest.mark.parametrize("name", ["max_step_tokens", "max_num_seqs", "page_tokens"])
def test_limits_below_one_are_refused(name: str) -> None:
    limits = {"max_step_tokens": 1, "max_num_seqs": 1, "page_tokens": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        Scheduler(**limits)


def test_the_queue_moves_again_when_the_last_running_request_leaves_after_a_preemption() -> None:
    scheduler = small_scheduler()
    scheduler.add(0, 4, 9)
    scheduler.add(1, 4, 9)
    run_plan(scheduler)
    assert scheduler.preempt_for_pages() == 1
    scheduler.remove(0)
    assert [item.request_id for item in scheduler.plan(100).items] == [1]
