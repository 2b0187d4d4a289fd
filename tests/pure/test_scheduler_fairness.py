"""Fairness of the scheduler: shares of keys, short prompts beside long ones, priorities, slots, nobody forgotten."""

import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glint.engine.scheduler import Scheduler
from glint.engine.share import Share
from glint.engine.step_plan import StepItem
from glint.errors import RequestError
from tests.pure.step_machine import Machine, Work

PLENTY_PAGES = 10**6


def machine_of(scheduler: Scheduler, page_tokens: int, num_pages: int = PLENTY_PAGES, depth: int = 2) -> Machine:
    return Machine(scheduler, num_pages, page_tokens, {}, depth)


def add(machine: Machine, prompt_tokens: int, new_tokens: int = 1, share: Share | None = None) -> int:
    """Queue one more request that writes all its tokens."""
    request_id = len(machine.works)
    machine.works[request_id] = Work(prompt_tokens, new_tokens, new_tokens, share=share or Share())
    machine.works[request_id].arrives_at = machine.num_collected
    machine.add(request_id)
    return request_id


@st.composite
def shared_machines(draw: st.DrawFn) -> tuple[Machine, list[tuple[int, int]]]:
    """A machine with requests of several keys, and the steps at which clients of some leave."""
    page_tokens = draw(st.integers(1, 8))
    num_pages = draw(st.integers(1, 24))
    capacity = page_tokens * num_pages
    works, cancelled, arrives_at = {}, [], 0
    weights = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    for request_id in range(draw(st.integers(1, 12))):
        prompt_tokens = draw(st.integers(1, capacity))
        max_new_tokens = draw(st.integers(1, capacity - prompt_tokens + 1))
        key = draw(st.integers(0, len(weights) - 1))
        share = Share(key, weights[key], draw(st.sampled_from((0, 0, -3, 1000))))
        arrives_at += draw(st.sampled_from((0, 0, 1, 5)))
        stops_after = draw(st.integers(1, max_new_tokens))
        prefix_tokens = draw(st.sampled_from((0, 0, capacity)))
        works[request_id] = Work(prompt_tokens, max_new_tokens, stops_after, prefix_tokens, arrives_at, share)
        if draw(st.booleans()):
            cancelled.append((arrives_at + draw(st.integers(0, 20)), request_id))
    scheduler = Scheduler(draw(st.integers(1, 40)), draw(st.integers(1, 8)), page_tokens)
    return Machine(scheduler, num_pages, page_tokens, works, depth=draw(st.integers(1, 2))), sorted(cancelled)


@given(shared_machines())
def test_every_request_ends_whatever_keys_and_priorities_there_are(
    made: tuple[Machine, list[tuple[int, int]]],
) -> None:
    machine, cancelled = made
    arriving = sorted(machine.works, key=lambda request_id: (machine.works[request_id].arrives_at, request_id))
    while arriving or machine.scheduler.has_work:
        now = machine.num_collected
        while arriving and (machine.works[arriving[0]].arrives_at <= now or not machine.scheduler.has_work):
            machine.add(arriving.pop(0))
        while cancelled and cancelled[0][0] <= now:
            _, request_id = cancelled.pop(0)
            if request_id not in arriving and not machine.works[request_id].is_finished:
                machine.cancel(request_id)
        if machine.scheduler.has_work:
            machine.step()
    while machine.in_flight:
        machine.collect()
    assert all(work.is_finished for work in machine.works.values())
    assert machine.available_pages == machine.num_pages
    assert machine.yields <= sum(len(plan.first_items) for plan in machine.plans)
    for plan in machine.plans:
        assert plan.num_tokens <= machine.scheduler._max_step_tokens
        assert len(plan.items) <= machine.scheduler.max_running
        assert len({item.request_id for item in plan.items}) == len(plan.items)


@given(shared_machines())
def test_equal_arrivals_give_equal_plans(made: tuple[Machine, list[tuple[int, int]]]) -> None:
    machine, _ = made
    scheduler = machine.scheduler
    other = Scheduler(scheduler._max_step_tokens, scheduler.max_running, machine.page_tokens)
    if (other.chunk_tokens, other.max_running) != (scheduler.chunk_tokens, scheduler.max_running):
        return
    works = {key: Work(*(getattr(work, name) for name in FIELDS)) for key, work in machine.works.items()}
    twin = Machine(other, machine.num_pages, machine.page_tokens, works, machine.depth)
    machine.run_to_end()
    twin.run_to_end()
    assert machine.plans == twin.plans


FIELDS = ("prompt_tokens", "max_new_tokens", "stops_after", "prefix_tokens", "arrives_at", "share")


@given(
    sizes=st.tuples(*(st.lists(st.integers(40, 200), min_size=1, max_size=5) for _ in range(2))),
    weights=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    budget=st.integers(10, 40),
)
def test_busy_keys_get_prompt_tokens_by_weight_in_every_window(
    sizes: tuple[list[int], list[int]], weights: tuple[int, int], budget: int
) -> None:
    machine = machine_of(Scheduler(budget, 6, page_tokens=2), page_tokens=2)
    made = [0, 0]
    for _ in range(60):
        for key in range(2):
            while made[key] - sum(work.is_finished for work in machine.works.values() if work.share.key == key) < 12:
                add(machine, sizes[key][made[key] % len(sizes[key])], share=Share(key, weights[key]))
                made[key] += 1
        machine.step()
    leads = [0.0]
    for counts in machine.prompt_tokens:
        tokens = Counter()
        for request_id, count in counts.items():
            tokens[machine.works[request_id].share.key] += count
        leads.append(leads[-1] + tokens[0] / weights[0] - tokens[1] / weights[1])
    chunk_tokens = machine.scheduler.chunk_tokens
    assert max(leads) - min(leads) <= 2 * chunk_tokens * (1 / weights[0] + 1 / weights[1])


@pytest.mark.parametrize("key", ["flooding", "other"])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 50, 51, 150])
@pytest.mark.parametrize("num_shorts", [1, 10])
def test_a_short_prompt_does_not_wait_for_forty_long_ones(key: str, steps_before: int, num_shorts: int) -> None:
    machine = machine_of(Scheduler(512, 64, page_tokens=16), page_tokens=16)
    for _ in range(40):
        add(machine, 3000, 64, Share("flooding"))
    for _ in range(steps_before):
        machine.step()
    shorts = [add(machine, 31, 8, Share(key)) for _ in range(num_shorts)]
    while not all(machine.works[request_id].new_tokens for request_id in shorts):
        machine.step()
    assert machine.num_collected - steps_before <= machine.depth + 2
    num_unfinished = sum(not work.is_finished for work in machine.works.values())
    assert num_unfinished >= 40 + num_shorts - steps_before // 6


def bound_of_steps(machine: Machine, works: list[Work], target: Work) -> int:
    """Steps after which the target has ended, by the argument of the scheduler: it does not look at later requests.

    `works` are the requests that were there when the target came. Each of them, and the target, is the oldest of all
    for as long as what runs then needs to end, and as it needs itself. A turn of its key comes after every other key
    has had a chunk and its share of a chunk, in steps of one token at worst; every second turn is the oldest's.
    """
    scheduler = machine.scheduler
    chunk = scheduler.chunk_tokens
    weights = {work.share.key: work.share.weight for work in machine.works.values()}
    weight = target.share.weight
    turn = 1 + sum(
        2 * chunk + math.ceil(chunk * other / weight) for key, other in weights.items() if key != target.share.key
    )
    longest = max(work.prompt_tokens + work.stops_after for work in machine.works.values())
    to_drain = scheduler.max_running * 2 * (math.ceil(longest / chunk) + 1) * turn + longest
    own = 2 * (math.ceil(longest / chunk) + 1) * turn + longest
    return (len(works) + 1) * (machine.depth + to_drain + own)


def run_under_siege(machine: Machine, target_id: int, arrive: Callable[[], None]) -> int:
    """Steps until the target has ended, while something arrives before every step; never more than the bound."""
    target = machine.works[target_id]
    before = [work for key, work in machine.works.items() if key != target_id and not work.is_finished]
    arrive()
    bound = bound_of_steps(machine, before, target)
    start = machine.num_collected
    while not target.is_finished:
        assert machine.num_collected - start <= bound, "a request waits for ever"
        arrive()
        machine.step()
    return machine.num_collected - start


@settings(max_examples=40, deadline=None)
@given(
    target_tokens=st.integers(1, 24),
    attackers=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 8), st.integers(1, 6), st.sampled_from((0, -1000))),
        min_size=1,
        max_size=3,
    ),
    before=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 24), st.integers(1, 6)), max_size=3),
    num_pages=st.integers(30, 60),
    limits=st.tuples(st.integers(2, 12), st.integers(1, 4)),
    priority=st.sampled_from((0, 1000)),
)
def test_nobody_waits_for_ever_under_endless_arrivals(
    target_tokens: int,
    attackers: list[tuple[int, int, int, int]],
    before: list[tuple[int, int, int]],
    num_pages: int,
    limits: tuple[int, int],
    priority: int,
) -> None:
    machine = machine_of(Scheduler(*limits, page_tokens=1), page_tokens=1, num_pages=num_pages)
    weights = (1, 3, 1)
    for key, prompt_tokens, new_tokens in before:
        add(machine, prompt_tokens, new_tokens, Share(key, weights[key], 0))
        machine.step()
    target_id = add(machine, target_tokens, 4, Share(0, 1, priority))

    def arrive() -> None:
        for key, prompt_tokens, new_tokens, urgency in attackers:
            unfinished = sum(not work.is_finished for work in list(machine.works.values())[-40:])
            if unfinished < 40:
                add(machine, prompt_tokens, new_tokens, Share(key, weights[key], urgency))

    run_under_siege(machine, target_id, arrive)


def test_short_prompts_do_not_fill_what_is_too_little_for_an_oldest_that_is_due() -> None:
    scheduler = Scheduler(16, 3, page_tokens=1)
    assert scheduler.chunk_tokens == 13
    scheduler.add(0, 26, 1, share=Share("long", priority=1))
    scheduler.add(1, 4, 1, share=Share("long"))
    scheduler.start_step(scheduler.plan(1000), {})
    assert scheduler.num_running == 1, "the shorter one begins"
    scheduler.remove(1)
    scheduler.add(2, 4, 1, share=Share("long"))
    scheduler.add(3, 12, 1, share=Share("other"))
    plan = scheduler.plan(1000)
    assert plan.items == (StepItem(3, 12),), "a short prompt took the turn of the oldest"
    scheduler.start_step(plan, {})
    assert scheduler.plan(1000).items[0] == StepItem(0, 13)


def test_of_keys_that_wait_for_the_only_slot_none_is_forgotten() -> None:
    machine = machine_of(Scheduler(2, 1, page_tokens=1), page_tokens=1)
    for key in (1, 2):
        for _ in range(20):
            add(machine, 4, 6, Share(key))
    machine.step()
    target_id = add(machine, 3, 4, Share(0))
    while not machine.works[target_id].is_finished:
        machine.step()
    assert sum(work.is_finished for work in machine.works.values()) <= 4


def test_an_oldest_is_tried_where_a_better_one_of_its_key_has_no_room() -> None:
    scheduler = Scheduler(6, 1, page_tokens=1)
    scheduler.add(0, 24, 1, share=Share("first"))
    scheduler.add(1, 14, 1, share=Share("first"))
    scheduler.add(2, 4, 1, share=Share("second"))
    assert scheduler.plan(36).items == (StepItem(0, 5),)


@pytest.mark.parametrize("urgency", [0, -1000])
def test_a_long_prompt_gets_every_second_turn_of_its_key(urgency: int) -> None:
    machine = machine_of(Scheduler(20, 4, page_tokens=4), page_tokens=4)
    assert machine.scheduler.chunk_tokens == 16
    long_id = add(machine, 160, 1)

    def arrive() -> None:
        add(machine, 15, 1, Share(priority=urgency))

    assert run_under_siege(machine, long_id, arrive) <= 2 * 10 + machine.depth + 1


def test_keys_that_return_with_one_request_after_another_do_not_keep_others_waiting() -> None:
    machine = machine_of(Scheduler(12, 4, page_tokens=4), page_tokens=4, depth=1)
    long_id = add(machine, 64, 1, Share("long"))
    while not machine.works[long_id].is_finished:
        assert machine.num_collected < 30
        add(machine, 8, 1, Share(machine.num_collected % 2))
        machine.step()


def test_what_a_key_had_is_not_forgotten_when_it_leaves() -> None:
    machine = machine_of(Scheduler(12, 4, page_tokens=4), page_tokens=4, depth=1)
    first = add(machine, 8, 1, Share("first"))
    second = add(machine, 24, 1, Share("second", weight=2))
    machine.step()
    assert machine.works[first].is_finished
    third = add(machine, 8, 1, Share("third"))
    machine.step()
    again = add(machine, 8, 1, Share("first"))
    machine.step()
    machine.step()
    assert [list(counts) for counts in machine.prompt_tokens] == [[first], [second], [third], [second]]
    machine.step()
    assert again in machine.prompt_tokens[-1]


def test_idleness_is_not_saved_up() -> None:
    machine = machine_of(Scheduler(12, 4, page_tokens=4), page_tokens=4, depth=1)
    add(machine, 8, 1, Share("idle"))
    machine.step()
    for _ in range(20):
        add(machine, 8, 1, Share("busy"))
    for _ in range(8):
        machine.step()
    for _ in range(20):
        add(machine, 8, 1, Share("idle"))
    for _ in range(8):
        machine.step()
    tokens = Counter()
    for counts in machine.prompt_tokens[-8:]:
        for request_id, count in counts.items():
            tokens[machine.works[request_id].share.key] += count
    assert abs(tokens["idle"] - tokens["busy"]) <= 16


def test_within_a_key_priority_goes_first_then_the_shorter_prompt_then_the_older() -> None:
    machine = machine_of(Scheduler(8, 1, page_tokens=1), page_tokens=1, depth=1)
    asked = [(8, 0), (4, 0), (6, -1), (4, 0), (8, 5)]
    ids = [add(machine, prompt_tokens, 1, Share(priority=priority)) for prompt_tokens, priority in asked]
    machine.run_to_end_of_queue()
    assert machine.first_scheduled == [ids[2], ids[0], ids[1], ids[3], ids[4]]


def test_a_key_with_all_slots_gives_those_to_which_another_is_entitled() -> None:
    machine = machine_of(Scheduler(64, 8, page_tokens=4), page_tokens=4)
    for _ in range(12):
        add(machine, 4, 1000, Share("first"))
    for _ in range(6):
        machine.step()
    assert machine.scheduler.num_running == 8
    others = [add(machine, 4, 1000, Share("second", weight=3)) for _ in range(12)]
    for _ in range(60):
        machine.step()
    running = Counter(machine.works[item.request_id].share.key for item in machine.plans[-1].items)
    assert running == {"first": 2, "second": 6}
    assert machine.yields == 6
    assert [work.times_preempted for work in machine.works.values()][:8] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert all(machine.works[request_id].times_preempted == 0 for request_id in others)


def test_a_slot_that_cannot_be_divided_stays_where_it_is() -> None:
    machine = machine_of(Scheduler(64, 7, page_tokens=4), page_tokens=4)
    for key in ("first", "second"):
        for _ in range(9):
            add(machine, 4, 1000, Share(key))
        for _ in range(40):
            machine.step()
    running = Counter(machine.works[item.request_id].share.key for item in machine.plans[-1].items)
    assert (running, machine.yields) == ({"first": 4, "second": 3}, 3)


def test_a_free_slot_is_kept_for_a_key_below_its_entitlement() -> None:
    scheduler = Scheduler(13, 4, page_tokens=4)
    for request_id in range(3):
        scheduler.add(request_id, 1, 9, share=Share("first"))
    scheduler.start_step(scheduler.plan(100), {})
    scheduler.add(3, 8, 9, share=Share("second"))
    scheduler.add(4, 8, 9, share=Share("second"))
    scheduler.add(5, 1, 9, share=Share("first", priority=-1))
    assert scheduler.find_yielding() is None
    plan = scheduler.plan(100)
    assert plan.first_items == (StepItem(3, 8),)
    scheduler.start_step(plan, {})
    assert scheduler.find_yielding() == 2
    scheduler.preempt(2)
    assert scheduler.find_yielding() is None
    assert [item.request_id for item in scheduler.plan(100).first_items] == [4]


def test_more_keys_than_slots_take_no_slots_from_each_other() -> None:
    machine = machine_of(Scheduler(8, 2, page_tokens=4), page_tokens=4)
    for key in range(5):
        for _ in range(2):
            add(machine, 4, 5, Share(key))
    machine.run_to_end_of_queue()
    assert machine.yields <= 1


def test_a_short_prompt_overtakes_one_that_lacks_pages_in_as_many_pages_as_that_needs() -> None:
    scheduler = Scheduler(64, 16, page_tokens=4)
    scheduler.add(0, 40, 9)
    scheduler.start_step(scheduler.plan(100), {})
    scheduler.add(1, 12, 9)
    for request_id in range(2, 8):
        scheduler.add(request_id, 4, 9)
    assert [item.request_id for item in scheduler.plan(100).first_items] == [2, 3, 4, 5, 6, 7, 1]
    plan = scheduler.plan(4)
    assert [item.request_id for item in plan.first_items] == [2], "what runs needs a page more for each"
    scheduler.start_step(plan, {})
    for _ in range(2):
        plan = scheduler.plan(5)
        scheduler.start_step(plan, {})
    assert scheduler.num_running == 3
    scheduler.remove(3)
    assert [item.request_id for item in scheduler.plan(4).first_items] == [4]
    scheduler.remove(0)
    assert scheduler.plan(3).first_items == (), "the oldest of all was overtaken"
    assert [item.request_id for item in scheduler.plan(9).first_items] == [1, 4, 5]


def test_nothing_that_starts_takes_the_pages_of_the_oldest_of_all() -> None:
    machine = machine_of(Scheduler(2, 2, page_tokens=1), page_tokens=1, num_pages=30)
    add(machine, 8, 5, Share(1, 3))
    machine.step()
    target_id = add(machine, 24, 4, Share(0, 1, 1000))

    def arrive() -> None:
        if sum(not work.is_finished for work in list(machine.works.values())[-40:]) < 40:
            add(machine, 8, 5, Share(0))
            add(machine, 8, 5, Share(1, 3))

    assert run_under_siege(machine, target_id, arrive) < 200


def test_where_pages_run_out_the_key_with_most_running_requests_gives_its_newest() -> None:
    scheduler = Scheduler(64, 16, page_tokens=4)
    for request_id, key in enumerate(("first", "first", "second", "first", "second")):
        scheduler.add(request_id, 4, 9, share=Share(key))
    scheduler.start_step(scheduler.plan(100), {})
    preempted = [scheduler.preempt_for_pages() for _ in range(5)]
    assert preempted == [3, 4, 1, 2, None]


def test_the_oldest_that_runs_keeps_its_pages_whatever_its_weight() -> None:
    scheduler = Scheduler(64, 16, page_tokens=4)
    scheduler.add(0, 4, 9, share=Share("light"))
    scheduler.add(1, 4, 9, share=Share("heavy", weight=3))
    scheduler.start_step(scheduler.plan(100), {})
    assert [scheduler.preempt_for_pages() for _ in range(2)] == [1, None]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weight": 0}, "weight is 0; give a whole number from 1 to 100"),
        ({"weight": 101}, "weight is 101; give a whole number from 1 to 100"),
        ({"weight": 1.5}, "weight is 1.5; give a whole number from 1 to 100"),
        ({"priority": 1001}, "priority is 1001; give a whole number from -1000 to 1000"),
        ({"priority": True}, "priority is True; give a whole number from -1000 to 1000"),
    ],
)
def test_a_share_out_of_bounds_is_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(RequestError, match=text):
        Share(**options)
