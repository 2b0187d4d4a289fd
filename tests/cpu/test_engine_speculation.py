"""Speculation in the whole engine: the same outputs as without, for every kind of request, under want of pages too."""

import random
import time
from collections.abc import Iterator
from ctypes import Array, c_uint32
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from glint import SamplingParams
from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.engine.drafts import Drafts
from glint.engine.engine import Engine
from glint.engine.request import StepOutput
from glint.errors import EngineError
from glint.native import abi
from glint.native.library import NativeEngine
from tests.cpu.small_engine import SMALL_SHAPE
from tests.cpu.whole_engine import assert_idle, gather, make_engine
from tests.reference.checkpoints import make_checkpoint

VOCAB_SIZE = 8
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "logprobs": 0},
    {"temperature": 0.8, "top_p": 0.9, "n": 3},
    {"temperature": 1.1, "min_p": 0.05, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    {"temperature": 0.0, "presence_penalty": 1.5, "logit_bias": {2: 3.0, 5: -4.0}, "logprobs": 2},
    {"temperature": 1.0, "stop_token_ids": (3,), "min_tokens": 9},
    {"temperature": 1.0, "stop_token_ids": (6,)},
    {"temperature": 0.9, "stop_token_sequences": ((1, 4), (2, 2))},
    {"temperature": 1.0, "prompt_logprobs": 2, "logprobs": 1},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    """A random model of eight tokens with an MTP layer."""
    folder = tmp_path_factory.mktemp("speculation")
    shape = SMALL_SHAPE | {"vocab_size": VOCAB_SIZE}
    yield open_checkpoint(make_checkpoint(folder, "glm47", "fp8_channel", mtp="without copies", **shape))


def submit_all(engine: Engine, count: int, seed: int) -> dict[int, int]:
    """Submit requests of every kind and return the number of the request of each id."""
    source = random.Random(seed)
    numbers = {}
    for number in range(count):
        prompt = [source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 30))]
        kind = {"ignore_eos": True, "seed": number, "max_tokens": source.randint(1, 25)} | KINDS[number % len(KINDS)]
        params = SamplingParams(**kind | {"max_tokens": max(kind["max_tokens"], kind.get("min_tokens", 0))})
        numbers |= dict.fromkeys(engine.submit(prompt, params), number)
    return numbers


def joined(outputs: list[StepOutput]) -> tuple[Any, ...]:
    """All that a request gave out, however it was cut into steps."""
    tokens = tuple(token for output in outputs for token in output.token_ids)
    logprobs = tuple(entry for output in outputs for entry in output.logprobs or ())
    last = outputs[-1]
    return tokens, logprobs, outputs[0].prompt_logprobs, last.finish_reason, last.failure, last.stop_reason


def answers(engine: Engine, count: int, seed: int) -> dict[int, tuple[Any, ...]]:
    """Everything that the requests gave out, by their ids."""
    ids = submit_all(engine, count, seed)
    outputs = gather(engine, {})
    assert outputs.keys() == ids.keys()
    assert_idle(engine)
    return {request_id: joined(outputs[request_id]) for request_id in ids}


@pytest.mark.parametrize("num_drafts", [1, 3, 8, "auto"])
@pytest.mark.parametrize("sizes", [{}, {"num_pages": 12}, {"max_step_tokens": 40, "max_num_seqs": 3}])
def test_outputs_are_those_without(checkpoint: Checkpoint, num_drafts: int | str, sizes: dict[str, int]) -> None:
    with make_engine(checkpoint=checkpoint) as engine:
        expected = answers(engine, 36, 5)
    with make_engine(checkpoint=checkpoint, num_speculative_tokens=num_drafts, **sizes) as engine:
        assert answers(engine, 36, 5) == expected


@pytest.fixture
def erratic(monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Lets the number of drafts be any from step to step and from request to request."""
    source = random.Random()
    monkeypatch.setattr(
        Drafts, "choose", lambda self, ids, is_decoding: [source.randint(0, self.max_drafts) for _ in ids]
    )
    return source


@pytest.mark.parametrize("seed", range(12))
def test_no_answer_depends_on_how_many_drafts_are_made(
    checkpoint: Checkpoint, erratic: random.Random, seed: int
) -> None:
    """Requests of every kind, submitted and aborted at any step, in few or many pages."""
    with make_engine(checkpoint=checkpoint) as engine:
        expected = answers(engine, 27, seed)
    erratic.seed(seed)
    sizes = erratic.choice([{}, {"num_pages": 12}, {"max_step_tokens": 40, "max_num_seqs": 3}, {"max_num_seqs": 2}])
    with make_engine(
        checkpoint=checkpoint, num_speculative_tokens=erratic.choice(["auto", 1, 2, 8]), **sizes
    ) as engine:
        ids = [*submit_all(engine, 27, seed)]
        aborted = set(erratic.sample(ids, 5))
        outputs: dict[int, list[StepOutput]] = {}
        for request_id in aborted:
            for _ in range(erratic.randrange(4)):
                for output in engine.step():
                    outputs.setdefault(output.request_id, []).append(output)
            engine.abort(request_id)
        gather(engine, outputs)
        assert_idle(engine)
        assert not engine._loop._drafts._requests
        assert {number: joined(outputs[number]) for number in ids if number not in aborted} == {
            number: expected[number] for number in ids if number not in aborted
        }


def test_auto_is_none_without_the_layer_and_up_to_four_with_it(checkpoint: Checkpoint) -> None:
    with make_engine(num_speculative_tokens="auto") as engine:
        assert (engine.settings.num_speculative_tokens, engine.settings.adapts_drafts) == (0, True)
    with make_engine(checkpoint=checkpoint, num_speculative_tokens="auto") as engine:
        assert (engine.settings.num_speculative_tokens, engine.settings.adapts_drafts) == (4, True)


def test_requests_without_drafts_run_ahead_as_ever(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no drafts are made, the next step is submitted before the last is collected."""
    monkeypatch.setattr(Drafts, "choose", lambda self, ids, is_decoding: [0] * len(ids))
    with make_engine(checkpoint=checkpoint, num_speculative_tokens="auto") as engine:
        engine.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
        for _ in range(5):
            engine.step()
            assert engine._loop._in_flight is not None
        gather(engine, {})


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps are in flight whenever one is collected."""
    found: list[int] = []
    original = NativeEngine.collect_step

    def watch(native: NativeEngine, ticket: abi.Ticket) -> Any:
        found.append(native.stats().steps_in_flight)
        return original(native, ticket)

    monkeypatch.setattr(NativeEngine, "collect_step", watch)
    return found


@pytest.mark.parametrize("kind", KINDS[:5])
def test_the_step_behind_a_drafting_step_is_submitted_before_its_collect(
    checkpoint: Checkpoint, depths: list[int], kind: dict[str, Any]
) -> None:
    with make_engine(checkpoint=checkpoint, num_speculative_tokens=2) as engine:
        engine.submit([1, 2, 3], SamplingParams(**kind | {"max_tokens": 30, "ignore_eos": True, "seed": 1}))
        for _ in range(4):
            engine.step()
            assert engine._loop._in_flight is not None and engine.stats().steps_in_flight == 1
        gather(engine, {})
        assert_idle(engine)
    assert depths[:-2] == [2] * len(depths[:-2]) and len(depths) > 8


@pytest.mark.parametrize("begins_after", [None, 3])
def test_steps_run_ahead_where_a_grammar_looks_at_the_drafts(
    checkpoint: Checkpoint, depths: list[int], begins_after: int | None
) -> None:
    with make_engine(checkpoint=checkpoint, num_speculative_tokens=3) as engine:
        free = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, seed=3)
        engine.submit([1, 2, 3], free)
        engine.submit([1, 2], free, grammar=Walk(None), begins_after=begins_after)
        gather(engine, {})
        assert_idle(engine)
    assert depths[:-2] == [2] * len(depths[:-2]) and len(depths) > 8


def test_without_pages_for_two_steps_of_drafts_the_first_is_collected(
    checkpoint: Checkpoint, depths: list[int]
) -> None:
    sizes = {"num_pages": 6, "page_tokens": 4, "max_model_len": 24}
    with make_engine(checkpoint=checkpoint, num_speculative_tokens=8, **sizes) as engine:
        engine.submit([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=3))
        gather(engine, {})
        assert_idle(engine)
        engine.submit([1], SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=3))
        engine.submit([2], SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=4))
        gather(engine, {})
        assert_idle(engine)
    assert {1, 2} == set(depths)


@pytest.mark.parametrize("seed", range(4))
def test_grammars_and_free_requests_share_an_engine(checkpoint: Checkpoint, erratic: random.Random, seed: int) -> None:
    """Grammars come and go beside free requests; some are aborted."""
    found = []
    for num_drafts in (0, 4):
        source = random.Random(seed)
        erratic.seed(seed)
        with make_engine(checkpoint=checkpoint, num_speculative_tokens=num_drafts, max_num_seqs=4) as engine:
            outputs: dict[int, list[StepOutput]] = {}
            ids = []
            for number in range(16):
                params = SamplingParams(temperature=1.0, seed=number, max_tokens=12, logprobs=1, ignore_eos=True)
                grammar: Any = Walk(None) if source.random() < 0.4 else None
                begins_after = source.choice((None, 3)) if grammar is not None else None
                ids += engine.submit([number % VOCAB_SIZE, 1], params, grammar=grammar, begins_after=begins_after)
                for output in engine.step():
                    outputs.setdefault(output.request_id, []).append(output)
            aborted = source.choice(ids)
            engine.abort(aborted)
            gather(engine, outputs)
            assert_idle(engine)
            found.append({number: joined(outputs[number]) for number in ids if number != aborted})
    assert found[0] == found[1]


def test_preempted_requests_go_on_as_if_nothing_had_been(checkpoint: Checkpoint) -> None:
    preemptions = 0
    for seed in range(4):
        with make_engine(checkpoint=checkpoint) as engine:
            expected = answers(engine, 24, seed)
        with make_engine(checkpoint=checkpoint, num_speculative_tokens=2, num_pages=10) as engine:
            assert answers(engine, 24, seed) == expected
            preemptions += engine.num_preemptions
    assert preemptions > 0


@pytest.mark.parametrize("num_drafts", [1, 3, 8])
def test_drafts_take_the_pages_of_no_request(checkpoint: Checkpoint, num_drafts: int) -> None:
    """Two requests that fill the page cache to its last page with their last tokens, beside drafts of many pages."""
    sizes = {"num_pages": 6, "page_tokens": 4, "max_model_len": 16}
    found = []
    for count in (0, num_drafts):
        with make_engine(checkpoint=checkpoint, num_speculative_tokens=count, **sizes) as engine:
            for seed in range(2):
                params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, seed=seed)
                engine.submit([1, 2, seed], params)
            outputs = gather(engine, {})
            assert_idle(engine)
            found.append({request_id: joined(outputs[request_id]) for request_id in outputs})
            assert engine.num_preemptions == 0
    assert found[0] == found[1]


@dataclass
class Walk:
    """Behind `begins_after` a token is followed by one of the next two, and the eleventh is the last."""

    begins_after: int | None
    seen: list[int] = field(default_factory=list)
    breaks_on_fork: bool = False

    def start(self, begins_after: int | None) -> "Walk":
        """A matcher at its beginning."""
        return Walk(begins_after, breaks_on_fork=self.breaks_on_fork)

    @property
    def is_finished(self) -> bool:
        return len(self.seen) == 11

    def mask(self) -> "Array[c_uint32] | None":
        if self.begins_after is not None:
            return None
        last = self.seen[-1] if self.seen else 0
        return (c_uint32 * 1)(1 << (last + 1) % VOCAB_SIZE | 1 << (last + 2) % VOCAB_SIZE)

    def accept(self, token_id: int) -> None:
        words = self.mask()
        assert not self.is_finished and (words is None or words[0] >> token_id & 1)
        if self.begins_after is None:
            self.seen.append(token_id)
        elif token_id == self.begins_after:
            self.begins_after = None

    def fork(self) -> "Walk":
        if self.breaks_on_fork:
            raise ValueError("no room for a second walk")
        return replace(self, seen=[*self.seen])


@pytest.mark.parametrize("breaks_on_fork", [False, True])
@pytest.mark.parametrize("begins_after", [None, 3])
def test_grammars_are_followed_in_every_row(
    checkpoint: Checkpoint, begins_after: int | None, breaks_on_fork: bool
) -> None:
    """Where the grammar begins, refuses a draft or ends among the drafts, and where it cannot look ahead."""
    found = []
    for num_drafts in (0, 3):
        with make_engine(checkpoint=checkpoint, num_speculative_tokens=num_drafts) as engine:
            grammar: Any = Walk(None, breaks_on_fork=breaks_on_fork)
            for seed in range(20):
                params = SamplingParams(
                    temperature=1.0, seed=seed, max_tokens=30, logprobs=1, ignore_eos=True, min_tokens=seed % 5
                )
                engine.submit([seed % VOCAB_SIZE, 1, 2], params, grammar=grammar, begins_after=begins_after)
            outputs = gather(engine, {})
            assert_idle(engine)
            found.append({request_id: joined(outputs[request_id]) for request_id in outputs})
            is_faster = any(len(output.token_ids) > 1 for parts in outputs.values() for output in parts)
    assert found[0] == found[1] and is_faster != breaks_on_fork
    assert {len(tokens) for tokens, *_ in found[0].values()} == {11} or begins_after is not None


def test_one_request_takes_fewer_steps(checkpoint: Checkpoint) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={5: 100.0})
    steps = []
    for num_drafts in (0, 3):
        with make_engine(checkpoint=checkpoint, num_speculative_tokens=num_drafts) as engine:
            engine.submit([1, 2, 3], params)
            outputs = gather(engine, {})
            assert [token for output in outputs[0] for token in output.token_ids] == [5] * 40
            steps.append(engine.last_step.serial)
    assert steps == [40, 11]


def test_rejected_drafts_count_as_nothing_else(checkpoint: Checkpoint) -> None:
    sums = []
    for num_drafts in (0, 3):
        with make_engine(checkpoint=checkpoint, num_speculative_tokens=num_drafts) as engine:
            submit_all(engine, 20, 7)
            summaries = []
            while engine.has_work:
                engine.step()
                summaries.append(engine.last_step)
            computed = engine.stats().tokens_computed
        drafts, accepted = (
            sum(getattr(one, name) for one in summaries) for name in ("draft_tokens", "accepted_tokens")
        )
        assert (0 < accepted < drafts) == (num_drafts > 0)
        assert num_drafts == 0 or computed == sum(one.num_tokens for one in summaries)
        sums.append(computed)
    assert sums[0] == sums[1]


def test_a_request_that_is_aborted_among_drafts_leaves_nothing(checkpoint: Checkpoint) -> None:
    with make_engine(checkpoint=checkpoint) as engine:
        expected = answers(engine, 9, 11)
    for steps in range(1, 8):
        with make_engine(checkpoint=checkpoint, num_speculative_tokens=3) as engine:
            ids = [*submit_all(engine, 9, 11)]
            outputs: dict[int, list[StepOutput]] = {}
            for _ in range(steps):
                for output in engine.step():
                    outputs.setdefault(output.request_id, []).append(output)
            aborted = {request_id for request_id in ids if request_id % 2}
            for request_id in aborted:
                engine.abort(request_id)
            gather(engine, outputs)
            assert_idle(engine)
            kept = {request_id: joined(outputs[request_id]) for request_id in ids if request_id not in aborted}
            assert kept == {request_id: expected[request_id] for request_id in kept}


def test_a_pause_behind_an_abort_is_not_the_time_of_a_step(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = 0.5
    times: list[float] = []

    def note(drafts: Drafts, num_requests: int, num_verified: int, num_made: int, seconds: float) -> None:
        times.append(seconds)

    monkeypatch.setattr(Drafts, "observe_step", note)
    with make_engine(checkpoint=checkpoint, num_speculative_tokens=2) as engine:
        (request_id,) = engine.submit([1, 2], SamplingParams(max_tokens=9, ignore_eos=True))
        engine.step()
        engine.abort(request_id)
        time.sleep(pause)
        engine.submit([1], SamplingParams(max_tokens=2, ignore_eos=True))
        while engine.has_work:
            engine.step()
    assert times and max(times) < pause


def test_a_checkpoint_without_the_layer_is_refused() -> None:
    with pytest.raises(EngineError, match="num_speculative_tokens is 2, but the checkpoint has no MTP layer"):
        make_engine(num_speculative_tokens=2)


@pytest.mark.parametrize("count", [-1, 9, True, 1.5, "many"])
def test_counts_out_of_range_are_refused(checkpoint: Checkpoint, count: Any) -> None:
    with pytest.raises(EngineError, match=r"num_speculative_tokens is .*integer from 0 to 8"):
        make_engine(checkpoint=checkpoint, num_speculative_tokens=count)


def test_drafting_requests_share_every_step_once_their_prompts_are_done(checkpoint: Checkpoint) -> None:
    """Prompts that end in different steps must not leave groups that take turns."""
    with make_engine(checkpoint=checkpoint, num_speculative_tokens=2, max_step_tokens=40, max_num_seqs=4) as engine:
        for number in range(4):
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            engine.submit([(number + place) % VOCAB_SIZE for place in range(25)], params)
        counts = []
        while engine.has_work:
            engine.step()
            counts.append((engine.num_running, engine.last_step.num_items))
    decoding = [items for running, items in counts[6:] if running == 4]
    assert decoding and set(decoding) == {4}
