"""Limits of a server, and the checks of body fields against them."""

import dataclasses
import math
from typing import Any

import pytest

from glint.errors import RequestError
from glint.sampling import MAX_CHOICES, SamplingParams
from glint.server.fields import check_count, check_schema, deadline_of
from glint.server.http.problems import Problem
from glint.server.limits import Limits


def test_every_limit_is_described_and_positive() -> None:
    for field in dataclasses.fields(Limits):
        assert f"`{field.name}`" in (Limits.__doc__ or "")
        for bad in (0, -1, math.nan, math.inf, True, "8"):
            with pytest.raises(RequestError, match=field.name):
                Limits(**{field.name: bad})
    with pytest.raises(RequestError, match="body_bytes"):
        Limits(body_bytes=1.5)
    with pytest.raises(RequestError, match="max_deadline_seconds"):
        Limits(deadline_seconds=10, max_deadline_seconds=9)


def test_no_more_choices_can_be_allowed_than_sampling_has() -> None:
    assert SamplingParams(n=Limits(choices=MAX_CHOICES).choices).n == MAX_CHOICES
    with pytest.raises(RequestError, match=f"--max-choices.* is {MAX_CHOICES + 1}; give at most {MAX_CHOICES}"):
        Limits(choices=MAX_CHOICES + 1)


def test_the_longest_deadline_is_told_exactly() -> None:
    with pytest.raises(Problem, match=r"at most 1234567\.5 \(--max-request-timeout\)"):
        deadline_of(2e6, Limits(max_deadline_seconds=1234567.5))


def test_a_count_above_its_limit_is_named() -> None:
    check_count("tools", 128, 128)
    with pytest.raises(Problem) as caught:
        check_count("tools", 129, 128)
    assert (caught.value.status, caught.value.param) == (400, "tools")
    assert caught.value.message == "the field 'tools' has 129 entries; at most 128 are allowed"


def nested(depth: int) -> Any:
    value: Any = {}
    for level in range(depth - 1):
        value = {"a": value, "b": 1} if level % 2 else [0, value]
    return value


@pytest.mark.parametrize("depth", [1, 2, 31, 32])
def test_schemas_within_the_limits(depth: int) -> None:
    check_schema("response_format", nested(depth), Limits())


@pytest.mark.parametrize("depth", [33, 34, 100_000])
def test_schemas_that_are_too_deep(depth: int) -> None:
    with pytest.raises(Problem, match="'response_format' nests deeper than the 32 levels") as caught:
        check_schema("response_format", nested(depth), Limits())
    assert caught.value.param == "response_format"


def test_schemas_that_are_too_long() -> None:
    limits = Limits(schema_bytes=20)
    check_schema("s", {"a": "\u00e9" * 6}, limits)
    with pytest.raises(Problem, match="'s' has 21 bytes as JSON; at most 20"):
        check_schema("s", {"a": "\u00e9" * 6 + "x"}, limits)


def test_deadlines() -> None:
    limits = Limits(deadline_seconds=10, max_deadline_seconds=20)
    assert deadline_of(None, limits) == 10
    assert deadline_of(20, limits) == 20
    for bad in (0, -1, 20.1, math.nan, math.inf):
        with pytest.raises(Problem, match=f"'deadline_seconds' is {bad}"):
            deadline_of(bad, limits)
