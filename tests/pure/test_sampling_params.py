"""SamplingParams: defaults change nothing, every bad value is refused with its name, value and range."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glint.errors import RequestError
from glint.native import abi
from glint.sampling import MAX_LOGPROBS, SamplingParams


def test_accepted_spellings_become_one() -> None:
    assert SamplingParams(stop="a") == SamplingParams(stop=["a"]) == SamplingParams(stop=("a",))
    assert SamplingParams(stop=None) == SamplingParams(stop_token_ids=None) == SamplingParams()
    assert SamplingParams(top_k=-1).top_k == 0


def test_later_changes_of_what_was_given_do_not_reach_the_params() -> None:
    bias, stops = {3: 1.0}, ["x"]
    params = SamplingParams(logit_bias=bias, stop=stops)
    bias[4] = math.nan
    stops.append("")
    assert dict(params.logit_bias) == {3: 1.0}
    assert params.stop == ("x",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3


NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", None, True, 1e9, -1e9])
def test_bad_numbers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value) and repr(value) in str(caught.value)


INTEGERS = ["n", "top_k", "seed", "max_tokens", "logprobs", "prompt_logprobs"]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.5, "1", True, -2, 2**70, math.nan])
def test_bad_integers_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value) and repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "edge", "beyond"),
    [
        ("n", 1, 0),
        ("temperature", 0.0, -0.001),
        ("top_p", 1.0, 1.001),
        ("top_p", 1e-37, 0.0),
        ("top_p", 1e-37, 9.9e-38),
        ("top_p", 1e-37, 1e-300),
        ("min_p", 1.0, 1.001),
        ("repetition_penalty", 1e-37, 1e-300),
        ("frequency_penalty", -2.0, -2.001),
        ("presence_penalty", 2.0, 2.001),
        ("seed", 2**64 - 1, 2**64),
        ("max_tokens", 1, 0),
        ("logprobs", 20, 21),
        ("prompt_logprobs", 0, -1),
        ("stop_token_ids", (0,), (-1,)),
        ("stop_token_sequences", ((0,),), ((-1,),)),
        ("stop_token_sequences", ((2**31 - 1, 0),), ((0, 2**31),)),
        ("stop_token_sequences", [[1] * 256], [[1] * 257]),
        ("stop_token_sequences", [[1]] * 256, [[1]] * 257),
        ("stop_token_sequences", (), ((),)),
        ("logit_bias", {0: 100.0}, {0: 100.1}),
        ("logit_bias", {0: -100}, {-1: 0.0}),
        ("stop", "x", ""),
        ("stop", ["x"] * 64, ["x"] * 65),
        ("stop", ["x"], [3]),
        ("ignore_eos", True, 1),
    ],
)
def test_ranges_end_where_they_say(name: str, edge: Any, beyond: Any) -> None:
    SamplingParams(**{name: edge})
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: beyond})


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None])
def test_bad_biases_are_refused(value: Any) -> None:
    with pytest.raises(RequestError, match=r"logit_bias\[5\]"):
        SamplingParams(logit_bias={5: value})


@pytest.mark.parametrize(
    ("name", "value"), [("logit_bias", [1]), ("stop", 3), ("stop_token_ids", "12"), ("stop_token_sequences", [[1], 2])]
)
def test_wrong_collections_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@given(st.floats(0, 100), st.floats(1e-37, 1), st.floats(0, 1))
def test_every_number_in_range_is_accepted_as_it_is(temperature: float, top_p: float, min_p: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p)
    assert (params.temperature, params.top_p, params.min_p) == (temperature, top_p, min_p)


def test_the_logprob_limit_is_the_native_one() -> None:
    assert MAX_LOGPROBS == abi.MAX_LOGPROBS
