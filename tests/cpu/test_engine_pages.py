"""Pages of a whole engine: refusal, exact fits, reuse, eviction, and books that add up after every step."""

import random
from itertools import cycle
from pathlib import Path

import pytest

from glint.checkpoint.table import open_checkpoint
from glint.native import abi
from glint.native.library import NativeEngine, OutOfPages, StepOutcome
from tests.cpu.small_engine import (
    VOCAB_SIZE,
    Ask,
    Session,
    answer_all,
    answer_alone,
    make_ask,
    open_engine,
)
from tests.reference.checkpoints import FAMILIES, WEIGHTS, Family, Weights, make_checkpoint

pytestmark = pytest.mark.sanitize

PAGE_TOKENS = 8
SCHEDULE_STEPS = 3000


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """Random tokens."""
    source = random.Random(seed)
    return tuple(source.randrange(VOCAB_SIZE) for _ in range(count))


def page_counts(engine: NativeEngine) -> tuple[int, int, int]:
    """Free, held and cached pages, which must add up."""
    stats = engine.stats()
    assert stats.pages_free + stats.pages_held + stats.pages_cached == stats.num_pages
    return stats.pages_free, stats.pages_held, stats.pages_cached


def refused_pages(session: Session, *items: tuple[int, int]) -> int:
    """How many pages a step is short of; the refusal must change nothing."""
    before = bytes(session.engine.stats())
    with pytest.raises(OutOfPages) as refusal:
        session.engine.submit_step(items)
    assert bytes(session.engine.stats()) == before
    session.engine.check()
    return refusal.value.missing_pages


def test_engine_without_pages_refuses_every_step() -> None:
    with open_engine(num_pages=0) as engine:
        session = Session(engine)
        request_id = session.add(make_ask(tokens(17)))
        assert refused_pages(session, (request_id, 1)) == 1
        assert refused_pages(session, (request_id, 17)) == 3
        assert page_counts(engine) == (0, 0, 0)
        engine.release_pages(request_id)
        engine.free_request(request_id)
        assert engine.stats().num_requests == 0


def test_single_page_serves_a_request_that_fits() -> None:
    ask = make_ask(tokens(3), 6)
    with open_engine(num_pages=1) as engine:
        assert answer_all(engine, [ask]) == [answer_alone(ask)]
        assert answer_all(engine, [ask]) == [answer_alone(ask)]
        session = Session(engine)
        session.step([(session.add(ask), 3)])
        assert page_counts(engine) == (0, 1, 0)
        assert refused_pages(session, (session.add(ask), 3)) == 1


def test_pages_can_be_exactly_full() -> None:
    asks = [make_ask(tokens(16, 1), 9), make_ask(tokens(13, 2), 4)]
    with open_engine(num_pages=5) as engine:
        session = Session(engine)
        ids = [session.add(ask) for ask in asks]
        session.run()
        assert page_counts(engine) == (0, 5, 0)
        assert [session.free(request_id) for request_id in ids] == [answer_alone(ask) for ask in asks]
        assert page_counts(engine) == (0, 0, 5)


def test_one_page_short_is_refused_until_another_request_lets_go() -> None:
    asks = [make_ask(tokens(16, 1), 9), make_ask(tokens(13, 2), 4)]
    with open_engine(num_pages=4) as engine:
        session = Session(engine)
        first, second = (session.add(ask) for ask in asks)
        session.step([(first, 16), (second, 13)])
        assert page_counts(engine) == (0, 4, 0)
        assert refused_pages(session, (second, 1), (first, 1)) == 1
        assert refused_pages(session, (first, 1)) == 1
        engine.release_pages(second)
        while first in session.running:
            session.step([(first, 1)])
        assert refused_pages(session, (second, 16)) == 1
        assert session.free(first) == answer_alone(asks[0])
        session.run()
        assert session.free(second) == answer_alone(asks[1])


def test_step_that_is_short_admits_none_of_its_requests() -> None:
    asks = [make_ask(tokens(16, 1)), make_ask(tokens(13, 2))]
    with open_engine(num_pages=3) as engine:
        session = Session(engine)
        ids = [session.add(ask) for ask in asks]
        assert refused_pages(session, (ids[0], 16), (ids[1], 13)) == 1
        assert page_counts(engine) == (3, 0, 0)
        session.step([(ids[1], 13)])
        assert page_counts(engine) == (1, 2, 0)


def test_matched_pages_are_not_counted_as_room() -> None:
    prefix = tokens(2 * PAGE_TOKENS)
    with open_engine(num_pages=4) as engine:
        answer_all(engine, [make_ask(prefix + tokens(5, 1), 1)])
        assert page_counts(engine) == (2, 0, 2)
        session = Session(engine)
        request_id = session.add(make_ask(prefix + tokens(3 * PAGE_TOKENS, 2), 1))
        assert refused_pages(session, (request_id, 64)) == 1
        assert page_counts(engine) == (2, 0, 2)
        outcome = session.step([(request_id, 2 * PAGE_TOKENS)])
        assert outcome.items[0].cached_tokens == len(prefix)
        assert page_counts(engine) == (0, 4, 0)


def test_requests_share_the_pages_of_their_prefix() -> None:
    prefix = tokens(3 * PAGE_TOKENS)
    with open_engine() as engine:
        session = Session(engine)
        first = session.add(make_ask(prefix + tokens(2, 1), 4))
        session.step([(first, 64)])
        others = [session.add(make_ask(prefix + tokens(2, seed), 4)) for seed in (2, 3, 4)]
        outcome = session.step([(request_id, 64) for request_id in others])
        assert [item.cached_tokens for item in outcome.items] == [len(prefix)] * 3
        assert page_counts(engine)[1] == 3 + 4
        assert engine.stats().tokens_cached == 3 * len(prefix)
        session.free(first)
        assert page_counts(engine)[1] == 3 + 3


def test_cached_pages_of_two_requests_of_a_step_are_held_once() -> None:
    prefix = tokens(2 * PAGE_TOKENS)
    with open_engine(num_pages=4) as engine:
        answer_all(engine, [make_ask(prefix + tokens(1, 1), 1)])
        assert page_counts(engine) == (2, 0, 2)
        session = Session(engine)
        ids = [session.add(make_ask(prefix + tokens(1, seed), 1)) for seed in (2, 3)]
        outcome = session.step([(request_id, 64) for request_id in ids])
        assert [item.cached_tokens for item in outcome.items] == [len(prefix)] * 2
        assert page_counts(engine) == (0, 4, 0)


def test_salts_separate_tenants() -> None:
    prompt = tokens(4 * PAGE_TOKENS + 1)
    with open_engine() as engine:
        for salt, expected in ((1, 0), (2, 0), (1, 32), (2**63 - 1, 0), (0, 0), (2, 32), (2**63 - 1, 32)):
            (answer,) = answer_all(engine, [Ask(prompt, 4, cache_salt=salt)])
            assert answer.cached_tokens == expected
            assert answer == answer_alone(Ask(prompt, 4, cache_salt=salt))


def test_whole_prompt_in_the_cache_still_computes_its_last_token() -> None:
    prompt = tokens(4 * PAGE_TOKENS)
    with open_engine() as engine:
        first, second = (answer_all(engine, [make_ask(prompt, 2)])[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, 3 * PAGE_TOKENS)
        assert first == second


def test_prompt_logprobs_are_computed_where_the_prompt_is_cached() -> None:
    prompt = tokens(3 * PAGE_TOKENS + 1)
    asked = make_ask(prompt, 2, has_prompt_logprobs=1, num_prompt_logprobs=2)
    with open_engine() as engine:
        assert answer_all(engine, [make_ask(prompt, 2)] * 2)[1].cached_tokens == 0
        assert answer_all(engine, [make_ask(prompt, 2)])[0].cached_tokens == 3 * PAGE_TOKENS
        (answer,) = answer_all(engine, [asked])
        assert (answer, answer.cached_tokens) == (answer_alone(asked), 0)
        assert sorted(answer.logprobs) == [*range(1, len(prompt) + 2)]


def test_eviction_changes_no_answer() -> None:
    prefixes = [tokens(2 * PAGE_TOKENS, seed) for seed in range(5)]
    source = random.Random(9)
    with open_engine(num_pages=9) as engine:
        for _ in range(120):
            ask = make_ask(source.choice(prefixes) + tokens(source.randint(1, 20), source.randrange(4)), 6)
            assert answer_all(engine, [ask]) == [answer_alone(ask)]
            assert page_counts(engine)[1] == 0
        stats = engine.stats()
        assert stats.tokens_cached > 0
        assert stats.tokens_computed > 9 * PAGE_TOKENS


def test_least_recently_used_pages_go_first() -> None:
    prompts = [tokens(2 * PAGE_TOKENS + 1, seed) for seed in range(3)]
    with open_engine(num_pages=7) as engine:
        for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
            answer_all(engine, [make_ask(prompt, 1)])
        hits = [answer_all(engine, [make_ask(prompts[index], 1)])[0].cached_tokens for index in (0, 2)]
        assert hits == [2 * PAGE_TOKENS] * 2
        answer_all(engine, [make_ask(tokens(5 * PAGE_TOKENS, 7), 1)])
        assert answer_all(engine, [make_ask(prompts[1], 1)])[0].cached_tokens == 0


def test_pages_behind_the_reusable_tokens_go_first() -> None:
    kept, lost = tokens(2 * PAGE_TOKENS + 1, 1), tokens(4 * PAGE_TOKENS + 1, 2)
    with open_engine(num_pages=7) as engine:
        answer_all(engine, [make_ask(kept, 1)])
        session = Session(engine)
        request_id = session.add(make_ask(lost, 1))
        session.run()
        engine.limit_reuse(request_id, 2 * PAGE_TOKENS - 1)
        session.free(request_id)
        assert page_counts(engine) == (1, 0, 6)
        answer_all(engine, [make_ask(tokens(3 * PAGE_TOKENS + 1, 3), 1)])
        hits = [answer_all(engine, [make_ask(prompt, 1)])[0].cached_tokens for prompt in (kept, lost)]
        assert hits == [2 * PAGE_TOKENS, PAGE_TOKENS]


def test_pages_that_are_not_reusable_are_found_until_they_are_evicted() -> None:
    ask = make_ask(tokens(4 * PAGE_TOKENS + 1), 12)
    with open_engine(num_pages=12) as engine:
        session = Session(engine)
        request_id = session.add(ask)
        session.run()
        engine.limit_reuse(request_id, 0)
        whole = ask.prompt + tuple(session.free(request_id).tokens)
        for _ in range(2):
            (answer,) = answer_all(engine, [make_ask(whole, 3)])
            assert answer.cached_tokens == 5 * PAGE_TOKENS
            assert answer == answer_alone(make_ask(whole, 3))


def test_limit_of_a_request_in_flight_holds_at_its_collect() -> None:
    kept, lost = tokens(2 * PAGE_TOKENS + 1, 1), tokens(3 * PAGE_TOKENS + 1, 2)
    with open_engine(num_pages=6) as engine:
        answer_all(engine, [make_ask(kept, 1)])
        session = Session(engine)
        request_id = session.add(make_ask(lost, 4))
        session.step([(request_id, len(lost))])
        session.submit([(request_id, 1)])
        engine.limit_reuse(request_id, 0)
        session.free(request_id)
        session.collect()
        assert page_counts(engine) == (1, 0, 5)
        answer_all(engine, [make_ask(tokens(3 * PAGE_TOKENS + 1, 3), 1)])
        assert answer_all(engine, [make_ask(kept, 1)])[0].cached_tokens == 2 * PAGE_TOKENS


class Schedule:
    """A random life of an engine: requests come, run in random steps, are preempted, aborted in flight and freed."""

    def __init__(self, engine: NativeEngine, seed: int) -> None:
        self.session = Session(engine)
        self.engine = engine
        self.source = random.Random(seed)
        self.owners: dict[int, Ask] = {}
        self.refusals = 0
        self.finished = 0
        self.aborted = 0

    def random_ask(self) -> Ask:
        """One of some hundred requests, many with a common beginning."""
        shared = tokens(self.source.choice((0, 8, 17)), self.source.randrange(2))
        sampling = {"temperature": 1.0, "seed": 5} if self.source.random() < 0.5 else {}
        return make_ask(shared + tokens(self.source.choice((1, 9, 15)), self.source.randrange(2)), 7, **sampling)

    def come_and_go(self) -> None:
        """Add, abort, preempt or free requests."""
        running = self.session.running
        if len(self.session.answers) < 6 and (not running or self.source.random() < 0.3):
            ask = self.random_ask()
            self.owners[self.session.add(ask)] = ask
        elif running and self.source.random() < 0.1:
            self.engine.limit_reuse(self.source.choice(running), self.source.randrange(40))
        elif self.source.random() < 0.03:
            self.aborted += 1
            self.session.free(self.source.choice(running))
        elif not self.session.tickets and self.source.random() < 0.1:
            self.engine.release_pages(self.source.choice(running))
        for request_id in self.session.answers.keys() - set(self.session.running):
            assert self.session.free(request_id) == answer_alone(self.owners.pop(request_id))
            self.finished += 1

    def submit(self) -> None:
        """Submit a random step; where pages are short, collect and preempt until there is room."""
        running = self.session.running
        if not running:
            return
        chosen = self.source.sample(running, self.source.randint(1, len(running)))
        items = [(request_id, self.source.choice((1, 1, 4, 30))) for request_id in chosen]
        try:
            self.session.submit(items)
        except OutOfPages as shortage:
            assert shortage.missing_pages > 0
            self.refusals += 1
            while self.session.tickets:
                self.check(self.session.collect())
            for request_id in self.session.running:
                if self.source.random() < 0.5:
                    self.engine.release_pages(request_id)

    def check(self, outcome: StepOutcome) -> None:
        """The books add up, in the step's own result and in the counters."""
        counts = page_counts(self.engine)
        assert (outcome.pages_free, outcome.pages_held, outcome.pages_cached) == counts
        self.engine.check()

    def run(self, num_steps: int) -> None:
        """Run until so many steps are done, then free everything."""
        while self.engine.stats().steps_done < num_steps:
            self.come_and_go()
            if len(self.session.tickets) < self.source.choice((1, 2)):
                self.submit()
            elif self.session.tickets:
                self.check(self.session.collect())
            page_counts(self.engine)
        for request_id in list(self.session.answers):
            self.session.free(request_id)
        while self.session.tickets:
            self.check(self.session.collect())


@pytest.mark.parametrize("num_pages", [6, 14])
def test_pages_add_up_over_thousands_of_steps(num_pages: int) -> None:
    with open_engine(num_pages=num_pages) as engine:
        schedule = Schedule(engine, seed=num_pages)
        schedule.run(SCHEDULE_STEPS)
        assert schedule.refusals > 20 and schedule.finished > 100 and schedule.aborted > 10
        stats = engine.stats()
        assert (stats.num_requests, stats.steps_in_flight, stats.pages_held) == (0, 0, 0)
        assert stats.pages_free + stats.pages_cached == num_pages
        assert stats.tokens_cached > 0


@pytest.mark.parametrize(("family", "weights"), [*zip(cycle(FAMILIES), WEIGHTS)])
def test_weights_are_mapped_not_copied(family: Family, weights: Weights, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, family, weights))
    with open_engine(checkpoint, num_pages=1) as engine:
        stats = engine.stats()
    places = {(tensor.file_index, tensor.file_offset, tensor.byte_count) for tensor in checkpoint.tensors}
    assert stats.weight_bytes_mapped == sum(byte_count for *_, byte_count in places)
    assert 0 < stats.weight_bytes_copied < 0.15 * stats.weight_bytes_mapped


def test_small_request_may_end_at_the_longest_context() -> None:
    prompt = tokens(30)
    ask = make_ask(prompt, 100)
    for max_context_tokens in (31, 32, 33, 40):
        with open_engine(num_pages=5, max_context_tokens=max_context_tokens) as engine:
            session = Session(engine)
            request_id = session.add(ask)
            session.run_overlapped()
            answer = session.free(request_id)
            assert answer.finish_reason == abi.FINISH_LENGTH
            assert answer.tokens == answer_alone(make_ask(prompt, 10)).tokens[: max_context_tokens - len(prompt)]
