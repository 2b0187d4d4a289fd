"""The smoke check notices what it promises to notice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from glint.smoke import MAX_TOKENS, PROMPTS, SAMPLE_ANSWERS, Run, content_problems, describe_speed

GOOD = Run(
    prompt="The capital of France is",
    prompt_token_ids=(1, 2, 3, 4, 5),
    text=" Paris.",
    token_ids=tuple(range(10, 10 + MAX_TOKENS)),
    logprobs=(-0.5,) * MAX_TOKENS,
    finish_reason="length",
    prefill_seconds=0.5,
    decode_seconds=2.0,
)


def test_a_good_run_has_no_problems() -> None:
    assert content_problems(GOOD) == []
    assert content_problems(replace(GOOD, token_ids=(10, 11), finish_reason="stop")) == []


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (replace(GOOD, finish_reason="failed"), "ended with 'failed'"),
        (replace(GOOD, finish_reason=None), "ended with None"),
        (replace(GOOD, token_ids=(10, 11)), "after 2 tokens"),
        (replace(GOOD, text=" \n"), "gave no text"),
        (replace(GOOD, text=" Par\ufffd"), "not UTF-8"),
        (replace(GOOD, token_ids=(10,) * MAX_TOKENS), "only 1 different tokens"),
        (replace(GOOD, logprobs=(-8.0,) * MAX_TOKENS), "mean log-probability -8.00"),
        (replace(GOOD, logprobs=()), "mean log-probability nan"),
    ],
)
def test_a_bad_run_is_named(run: Run, said: str) -> None:
    problems = content_problems(run)
    assert len(problems) == 1
    assert said in problems[0] and GOOD.prompt in problems[0]


def test_the_sample_model_must_know_its_answer() -> None:
    assert content_problems(GOOD, "Paris") == []
    (problem,) = content_problems(replace(GOOD, text=" Lyon."), "Paris")
    assert "' Lyon.'" in problem and "'Paris'" in problem
    assert set(SAMPLE_ANSWERS) <= set(PROMPTS)


def test_speed_is_in_tokens_per_second() -> None:
    assert describe_speed([GOOD]) == f"prefill 10.0 tok/s, decode {(MAX_TOKENS - 1) / 2.0:,.1f} tok/s"
    assert describe_speed([replace(GOOD, decode_seconds=0.0)]).endswith("decode not measured")
