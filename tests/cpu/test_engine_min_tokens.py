"""The least number of tokens of an answer: no stop ends it before, and the first stop behind it does."""

from __future__ import annotations

import pytest

from glint import RequestError
from glint.sampling import SamplingParams
from tests.cpu.small_engine import VOCAB_SIZE
from tests.cpu.test_engine_masks import FollowerGrammar, run_one, tokens_of
from tests.cpu.whole_engine import alone, assert_idle, gather, greedy, make_engine, prompt_of, run

PROMPT = prompt_of(3, 17)


@pytest.mark.parametrize("min_tokens", [1, 4, 11])
@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 6}, {"num_pages": 6, "max_model_len": 48}])
def test_a_stop_token_is_impossible_before_the_least_number(min_tokens: int, options: dict[str, int]) -> None:
    stop = alone(PROMPT, 1)[0]
    with make_engine(**options) as engine:
        ids = [
            *engine.submit(PROMPT, greedy(12, stop_token_ids=[stop])),
            *engine.submit(PROMPT, greedy(12, stop_token_ids=[stop], min_tokens=min_tokens)),
            *engine.submit(PROMPT, greedy(min_tokens, logit_bias={stop: -100.0})),
        ]
        at_once, held, biased = run(engine, *ids)
        assert_idle(engine)
    assert at_once == [stop] and held[:min_tokens] == biased
    assert stop not in held[:-1] and (held[-1] == stop or len(held) == 12)


def test_where_almost_every_token_stops_the_answer_ends_right_behind_the_least_number() -> None:
    free = {5, 200, VOCAB_SIZE - 1}
    params = SamplingParams(
        n=4,
        temperature=1.0,
        seed=1,
        max_tokens=40,
        min_tokens=9,
        stop_token_ids=[token for token in range(VOCAB_SIZE) if token not in free],
    )
    with make_engine() as engine:
        outputs = gather(engine, {})
        ids = engine.submit(PROMPT, params)
        outputs = gather(engine, {})
    for request_id in ids:
        tokens = tokens_of(outputs[request_id])
        assert set(tokens[:9]) <= free and tokens[-1] not in free and len(tokens) >= 10
        assert outputs[request_id][-1].finish_reason == "stop"


def test_a_stop_token_sequence_is_not_completed_before_the_least_number() -> None:
    whole = alone(PROMPT, 8)
    sequences = [tuple(whole[2:5]), (whole[0],), tuple(whole[:8])]
    with make_engine() as engine:
        ids = [
            *engine.submit(PROMPT, greedy(8, stop_token_sequences=sequences[:1])),
            *engine.submit(PROMPT, greedy(8, stop_token_sequences=sequences[:1], min_tokens=4)),
            *engine.submit(PROMPT, greedy(8, stop_token_sequences=sequences[:1], min_tokens=5)),
            *engine.submit(PROMPT, greedy(8, stop_token_sequences=sequences[1:], min_tokens=1)),
        ]
        ended, ended_too, held, other = run(engine, *ids)
    assert ended == ended_too == whole[:5]
    assert held[:4] == whole[:4] and held[4] != whole[4]
    assert other[0] != whole[0]


def test_a_grammar_holds_beside_the_least_number_and_ends_the_answer_where_it_is_complete() -> None:
    answer = (3, 250, 3)
    with make_engine() as engine:
        outputs = run_one(engine, FollowerGrammar(answer), min_tokens=9, stop_token_ids=[250])
    assert tokens_of(outputs) == [3, 250], "the grammar allows nothing but the stop"
    with make_engine() as engine:
        outputs = run_one(engine, FollowerGrammar(answer), min_tokens=9)
    assert (tokens_of(outputs), outputs[-1].finish_reason) == (list(answer), "stop")


@pytest.mark.parametrize("value", [-1, 13, 2**31, 1.5, True])
def test_least_numbers_that_cannot_be(value: int) -> None:
    with pytest.raises(RequestError, match="min_tokens") as refused:
        SamplingParams(max_tokens=12, min_tokens=value)
    assert refused.value.field == "min_tokens"
    assert SamplingParams(max_tokens=12, min_tokens=12).min_tokens == 12
    assert SamplingParams(max_tokens=None, min_tokens=500).min_tokens == 500
