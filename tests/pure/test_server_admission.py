"""The books of the bounded queue balance whatever happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from glint.engine.share import Share
from glint.server.admission import Admission, QueueSlot
from glint.server.http.problems import Problem
from glint.server.limits import Limits


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refusal_of(admission: Admission, *prompt_tokens: int) -> Problem:
    with pytest.raises(Problem) as caught:
        admission.admit(prompt_tokens)
    return caught.value


def test_the_queue_is_bounded_in_requests_and_in_tokens() -> None:
    admission = Admission(Limits(waiting_requests=3, waiting_tokens=100))
    first = admission.admit([10, 10])
    assert refusal_of(admission, 1, 1).status == 429
    assert refusal_of(admission, 81).status == 429
    admission.admit([80])
    assert (admission.num_waiting, admission.waiting_tokens) == (3, 100)
    with pytest.raises(Problem), admission.preparing():
        raise AssertionError("it was let in")
    problem = refusal_of(admission, 1)
    assert problem.code == "queue_full" and "3 requests with 100 prompt tokens" in problem.message
    first.started(0)
    with admission.preparing(), pytest.raises(Problem), admission.preparing():
        raise AssertionError("two were let in")
    assert admission.num_preparing == 0
    admission.admit([10])
    assert (admission.num_waiting, admission.num_running, admission.waiting_tokens) == (3, 1, 100)


def test_a_request_is_read_only_while_one_more_and_one_more_token_have_room() -> None:
    admission = Admission(Limits(waiting_requests=3, waiting_tokens=100))
    admission.admit([99])
    with admission.preparing(), admission.preparing():
        assert admission.num_preparing == 2
        with pytest.raises(Problem) as caught, admission.preparing():
            raise AssertionError("three were let in beside the one that waits")
    assert (caught.value.status, caught.value.code) == (429, "queue_full")
    admission.admit([1])
    with pytest.raises(Problem) as caught, admission.preparing():
        raise AssertionError("there is no room for a token")
    assert (caught.value.status, caught.value.code, admission.num_preparing) == (429, "queue_full", 0)


def refusal_of_key(admission: Admission, key: str, weight: int, *prompt_tokens: int) -> Problem:
    with pytest.raises(Problem) as caught:
        admission.admit(prompt_tokens, Share(key, weight))
    return caught.value


def test_a_key_may_fill_the_queue_and_keeps_no_other_out() -> None:
    admission = Admission(Limits(waiting_requests=8, waiting_tokens=100))
    places = [admission.admit([5], Share("first")) for _ in range(8)]
    assert "limit of 8 requests in the queue: 8 requests with 40" in refusal_of_key(admission, "first", 1, 5).message
    for _ in range(4):
        with admission.preparing(Share("second")):
            pass
        admission.admit([5], Share("second"))
    problem = refusal_of_key(admission, "second", 1, 5)
    assert (problem.status, problem.code) == (429, "queue_full")
    assert "this key may hold 4 requests while others wait" in problem.message
    with pytest.raises(Problem), admission.preparing(Share("second")):
        raise AssertionError("it was let in")
    for _ in range(4):
        admission.admit([1], Share("third", 2))
    assert admission.num_waiting == 16
    assert refusal_of_key(admission, "fourth", 100, 1).status == 429, "the queue is longer than twice its bounds"
    for place in places:
        place.close()
    admission.admit([5], Share("fourth"))


def test_a_key_may_have_more_than_its_share_of_a_queue_that_is_not_over_full() -> None:
    admission = Admission(Limits(waiting_requests=4, waiting_tokens=100))
    admission.admit([1], Share("first"))
    admission.admit([1, 1, 1], Share("second"))
    assert refusal_of_key(admission, "second", 1, 1).status == 429


def test_the_share_of_a_key_is_bounded_in_tokens_too() -> None:
    admission = Admission(Limits(waiting_requests=8, waiting_tokens=100))
    admission.admit([100], Share("first"))
    admission.admit([30], Share("second", 3))
    assert "may hold 75 prompt tokens while others" in refusal_of_key(admission, "second", 3, 46).message
    admission.admit([45], Share("second", 3))


def test_requests_that_are_read_for_one_key_leave_room_for_another() -> None:
    admission = Admission(Limits(waiting_requests=2))
    with admission.preparing(Share("first")), admission.preparing(Share("first")):
        with pytest.raises(Problem), admission.preparing(Share("first")):
            raise AssertionError("it was let in")
        with admission.preparing(Share("second")):
            assert admission.num_preparing == 3
    assert admission.num_preparing == 0


def test_what_fits_no_queue_is_the_fault_of_the_request() -> None:
    admission = Admission(Limits(waiting_requests=3, waiting_tokens=100))
    for prompts in ([1] * 4, [101]):
        problem = refusal_of(admission, *prompts)
        assert (problem.status, problem.code) == (400, "request_exceeds_queue")
        assert "Retry-After" not in problem.headers
    assert (admission.num_waiting, admission.waiting_tokens) == (0, 0)


def retry_after(admission: Admission, *prompt_tokens: int) -> str:
    return refusal_of(admission, *prompt_tokens).headers["Retry-After"]


def test_retry_after_follows_the_speed_of_the_queue() -> None:
    clock = Clock()
    admission = Admission(Limits(waiting_requests=10, waiting_tokens=1000), clock)
    place = admission.admit([10] * 10)
    assert retry_after(admission, 1) == "1"
    for index in range(4):
        place.started(index)
        clock.now += 2.0
    admission.admit([10] * 4)
    assert retry_after(admission, 1) == "2"
    assert retry_after(admission, *[1] * 5) == "10"
    assert retry_after(admission, *[1] * 10) == "20"
    assert retry_after(admission, 1000) == "20"
    clock.now += 1e6
    assert retry_after(admission, 1) == "60"


def test_retry_after_looks_back_at_the_last_64_departures() -> None:
    clock = Clock()
    admission = Admission(Limits(waiting_requests=64, waiting_tokens=1000), clock)
    admission.admit([1]).started(0)
    clock.now += 1000.0
    for _ in range(63):
        admission.admit([1]).started(0)
    admission.admit([1] * 64)
    assert retry_after(admission, *[1] * 2) == "32"
    assert retry_after(admission, *[1] * 4) == "60"
    only_new = Admission(Limits(waiting_requests=64, waiting_tokens=1000), clock)
    only_new.admit([1]).started(0)
    clock.now += 1000.0
    for _ in range(64):
        only_new.admit([1]).started(0)
    clock.now += 30.0
    only_new.admit([1] * 64)
    assert retry_after(only_new, *[1] * 64) == "30"


def test_retry_after_counts_the_tokens_of_the_last_64_departures() -> None:
    clock = Clock()
    admission = Admission(Limits(waiting_requests=64, waiting_tokens=1000), clock)
    for tokens in (*[1000] * 10, *[1] * 64):
        admission.admit([tokens]).started(0)
    clock.now += 1.0
    admission.admit([1000])
    assert retry_after(admission, 640) == "10"


def test_a_refusal_is_the_same_until_the_queue_or_the_time_has_changed() -> None:
    clock = Clock()
    admission = Admission(Limits(waiting_requests=3, waiting_tokens=1000), clock)
    first = admission.admit([5, 5])
    assert admission.find_refusal() is None
    admission.admit([5])
    problem = admission.find_refusal()
    assert problem is not None and problem is admission.find_refusal()
    assert admission.find_refusal(Share("other")) is None, "another key has its share"
    first.started(0)
    assert admission.find_refusal() is None
    admission.admit([7])
    later = admission.find_refusal()
    assert later is not None and "3 requests with 17 prompt tokens" in later.message
    assert later.headers["Retry-After"] == "1"
    clock.now += 30.0
    last = admission.find_refusal()
    assert last is not None and last.headers["Retry-After"] == "30"


def test_retry_after_of_a_fast_queue_is_a_second() -> None:
    clock = Clock()
    admission = Admission(Limits(waiting_requests=2), clock)
    admission.admit([5]).close()
    clock.now += 0.001
    admission.admit([0, 5])
    assert retry_after(admission, 1) == "1"
    only_empty = Admission(Limits(waiting_requests=2, waiting_tokens=10), clock)
    only_empty.admit([0]).started(0)
    only_empty.admit([10])
    assert retry_after(only_empty, 1) == "60"


class Queue(RuleBasedStateMachine):
    """Any order of admissions, starts and ends against a plain list of what each request is doing."""

    places = Bundle("places")

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(Limits(waiting_requests=5, waiting_tokens=50))
        self.known: list[tuple[QueueSlot, list[int], list[str]]] = []

    @rule(target=places, tokens=st.lists(st.integers(0, 30), min_size=1, max_size=7))
    def admit(self, tokens: list[int]) -> int | None:
        waiting = self.waiting()
        fits = len(waiting) + len(tokens) <= 5 and sum(waiting) + sum(tokens) <= 50
        try:
            place = self.admission.admit(tokens)
        except Problem as problem:
            assert not fits
            assert problem.status == (400 if len(tokens) > 5 or sum(tokens) > 50 else 429)
            return None
        assert fits
        self.known.append((place, tokens, ["waiting"] * len(tokens)))
        return len(self.known) - 1

    def waiting(self) -> list[int]:
        pairs = [pair for _, tokens, states in self.known for pair in zip(tokens, states, strict=True)]
        return [tokens for tokens, state in pairs if state == "waiting"]

    @rule(chosen=places, index=st.integers(-1, 8))
    def start(self, chosen: int | None, index: int) -> None:
        if chosen is not None:
            place, _, states = self.known[chosen]
            place.started(index)
            if 0 <= index < len(states) and states[index] == "waiting":
                states[index] = "running"

    @rule(chosen=places, index=st.integers(-1, 8))
    def end(self, chosen: int | None, index: int) -> None:
        if chosen is not None:
            place, _, states = self.known[chosen]
            place.ended(index)
            if 0 <= index < len(states):
                states[index] = "ended"

    @rule(chosen=places)
    def close(self, chosen: int | None) -> None:
        if chosen is not None:
            place, tokens, _ = self.known[chosen]
            place.close()
            self.known[chosen] = (place, tokens, ["ended"] * len(tokens))

    @invariant()
    def books_balance(self) -> None:
        waiting = self.waiting()
        running = sum(states.count("running") for _, _, states in self.known)
        admission = self.admission
        assert (admission.num_waiting, admission.waiting_tokens) == (len(waiting), sum(waiting))
        assert admission.num_running == running

    def teardown(self) -> None:
        for place, _, _ in self.known:
            place.close()
        admission = self.admission
        assert (admission.num_waiting, admission.waiting_tokens, admission.num_running) == (0, 0, 0)


TestQueue = Queue.TestCase


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 100)), min_size=1, max_size=80), st.integers(1, 100))
def test_retry_after_is_always_a_whole_number_of_seconds(departures: list[tuple[float, int]], tokens: int) -> None:
    clock = Clock()
    admission = Admission(Limits(waiting_requests=1, waiting_tokens=100), clock)
    for pause, prompt in departures:
        clock.now += pause
        admission.admit([prompt]).started(0)
    admission.admit([100])
    assert 1 <= int(retry_after(admission, tokens)) <= 60
