"""Native sampling against NumPy, and against what transformers keeps, as recorded."""

import math
from collections.abc import Iterator
from ctypes import POINTER, byref, c_double, c_int32, c_uint64, create_string_buffer
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from glint.native import abi
from tests.cpu.sampling_rows import (
    MAX_TOP,
    SETTINGS_THAT_CUT,
    Row,
    chi_square_is_plausible,
    log_softmax,
    native_sampling,
    penalised_row,
    prompt_logprobs,
    random_bits,
    random_row,
    softmax,
    uniforms,
)
from tests.cpu.testing_library import declare
from tests.reference.expected import read_kept_tokens
from tests.reference.recorded_cases import KEPT_SEEDS, KEPT_VOCAB_SIZE

sanitize = pytest.mark.sanitize

INFINITY = math.inf
PENALTIES = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 1.1},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
]


@sanitize
@pytest.mark.parametrize("vocab_size", [1, 2, 31, 33, 127, 128, 129, 1000, 5003])
@pytest.mark.parametrize("penalties", PENALTIES)
def test_greedy_is_numpy_argmax(vocab_size: int, penalties: dict[str, float]) -> None:
    """Temperature 0 takes the highest changed logit, whatever bias, mask and penalties are on."""
    compared = 0
    for seed in range(30):
        row = random_row(seed, vocab_size, temperature=0.0, **penalties)
        if row.allowed is None or row.allowed.any():
            result = row.sample()
            assert (result.failure, result.token) == (abi.FAILURE_NONE, int(np.argmax(row.changed())))
            compared += 1
    assert compared >= 15


@sanitize
@pytest.mark.parametrize("settings", SETTINGS_THAT_CUT)
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_kept_tokens_are_those_of_numpy(settings: dict[str, Any], spread: float) -> None:
    """The kept set equals NumPy's in float64; only a cut within 2e-7 of a token may fall either way."""
    exact = 0
    for seed in range(12):
        row = random_row(seed, 3001, spread, repetition_penalty=1.2, frequency_penalty=0.3, **settings)
        fewest, most = row.kept_bounds()
        kept = set(row.kept_tokens())
        assert fewest <= kept <= most
        exact += fewest == most
    assert exact >= 9


@sanitize
def test_ties_are_cut_by_lower_id() -> None:
    """Among equal logits the lower ids are kept."""
    logits = np.zeros(1000, dtype=np.float32)
    assert Row(logits, {"temperature": 0.0}).sample().token == 0
    assert Row(logits, {"top_k": 7}).kept_tokens() == list(range(7))
    assert Row(logits, {"top_p": 0.25}).kept_tokens() == list(range(250))
    assert Row(logits, {"top_p": 0.25, "top_k": 100}).kept_tokens() == list(range(25))
    assert Row(logits, {"min_p": 1.0}).kept_tokens() == list(range(1000))
    logits[[400, 800]] = 1.0
    assert Row(logits, {"temperature": 0.0}).sample().token == 400
    assert Row(logits, {"top_k": 3}).kept_tokens() == [0, 400, 800]
    logits[5], logits[6] = -0.0, 0.0
    logits[[400, 800]] = -1.0
    assert Row(logits[5:], {"temperature": 0.0}).sample().token == 0


RECORDED_SETTINGS, RECORDED_KEPT = read_kept_tokens()


@sanitize
@pytest.mark.parametrize("index", range(len(RECORDED_SETTINGS)), ids=[str(one) for one in RECORDED_SETTINGS])
def test_kept_tokens_are_those_of_transformers(index: int) -> None:
    """transformers' processors, applied in our order, left the recorded tokens."""
    for seed, kept in enumerate(RECORDED_KEPT[index]):
        assert penalised_row(seed, RECORDED_SETTINGS[index]).kept_tokens() == np.flatnonzero(kept).tolist()


def test_every_setting_that_cuts_is_recorded() -> None:
    assert [one for one in SETTINGS_THAT_CUT if one not in RECORDED_SETTINGS] == [{"top_k": 10**6}]
    assert RECORDED_KEPT.shape == (len(SETTINGS_THAT_CUT) - 1, KEPT_SEEDS, KEPT_VOCAB_SIZE)
    assert RECORDED_KEPT.any(axis=2).all() and not RECORDED_KEPT.all(axis=2).any()


@sanitize
@pytest.mark.parametrize("settings", [{}, {"temperature": 2.5}, {"temperature": 0.05}, *SETTINGS_THAT_CUT])
def test_draw_is_the_gumbel_argmax_of_numpy(settings: dict[str, Any]) -> None:
    """Pruning is exact: the drawn token is NumPy's argmax of score plus Gumbel noise over all tokens that may come."""
    is_cut = not settings.keys().isdisjoint(("top_k", "top_p", "min_p"))
    for position in range(40):
        row = replace(random_row(position, 1500), position=position)
        row = replace(row, settings={**settings, "seed": 99 + position, "choice_index": 3})
        changed = row.changed()
        kept = np.array(row.kept_tokens()) if is_cut else np.flatnonzero(np.isfinite(changed))
        scaled = (changed - changed.max()) * (np.float32(1) / np.float32(settings.get("temperature", 1.0)))
        noise = -np.log(-np.log(uniforms(random_bits(99 + position, 3, position, 1500))))
        scores = (scaled.astype(np.float64) + noise)[kept]
        assert row.sample().token == kept[np.argmax(scores)]


@sanitize
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.7}, {"temperature": 3.0}, {"top_p": 0.8}, {"top_k": 12}, {"min_p": 0.1}]
)
def test_distribution_is_that_of_numpy(settings: dict[str, Any]) -> None:
    """Over 40,000 positions the token counts pass a chi-square test against NumPy's probabilities."""
    row = replace(random_row(4, 60, 1.5), settings={**settings, "seed": 2024})
    kept = sorted(row.kept_bounds()[0])
    probabilities = np.zeros(60)
    probabilities[kept] = softmax(row.changed().astype(np.float64)[kept] / settings.get("temperature", 1.0))
    counts = np.bincount(row.sample_positions(40_000), minlength=60)
    assert counts[probabilities == 0].sum() == 0
    assert chi_square_is_plausible(counts, probabilities * 40_000)
    assert not chi_square_is_plausible(counts, np.full(60, 40_000 / 60))


@sanitize
@pytest.mark.parametrize(
    ("other", "shift"),
    [({"seed": 5}, 1), ({"seed": 6}, 0), ({"seed": 5, "choice_index": 1}, 0), ({"seed": 4}, 1), ({"seed": 6}, -1)],
)
def test_neighbours_are_independent(other: dict[str, int], shift: int) -> None:
    """Pairs of draws at neighbouring positions, seeds and choices fill the 64 cells evenly."""
    flat = np.zeros(8, dtype=np.float32)
    first = Row(flat, {"seed": 5}, position=10).sample_positions(40_000)
    second = Row(flat, other, position=10 + shift).sample_positions(40_000)
    cells = np.bincount(first * 8 + second, minlength=64)
    assert chi_square_is_plausible(cells, np.full(64, 40_000 / 64))


@sanitize
def test_token_depends_on_seed_choice_and_position_only() -> None:
    """Equal (seed, choice, position) draw equal tokens; changing one of them draws others."""
    flat = np.zeros(5000, dtype=np.float32)
    base = Row(flat, {"seed": 7, "choice_index": 2}, position=100)
    tokens = base.sample_positions(50)
    assert [replace(base, position=100 + index).sample().token for index in range(50)] == tokens.tolist()
    for other in (
        replace(base, settings={"seed": 8, "choice_index": 2}),
        replace(base, settings={"seed": 7 + 2**32, "choice_index": 2}),
        replace(base, settings={"seed": 7, "choice_index": 3}),
        replace(base, position=150),
    ):
        assert np.sum(other.sample_positions(50) == tokens) <= 2


@sanitize
def test_random_bits_are_even_and_avalanche() -> None:
    """Each of 64 bits is set half of the time, and flipping one input bit flips half of the output."""
    bits = random_bits(1, 0, 0, 100_000)
    ones = np.array([np.sum((bits >> np.uint64(bit)) & np.uint64(1)) for bit in range(64)], dtype=np.float64)
    assert np.abs(ones - 50_000).max() < 5 * math.sqrt(25_000)
    values = np.sort(uniforms(bits))
    assert np.abs(values - (np.arange(100_000) + 0.5) / 100_000).max() < 2.2 / math.sqrt(100_000)
    for base, flipped in flipped_inputs():
        difference = random_bits(*base, 256) ^ random_bits(*flipped, 256)
        flips = np.unpackbits(difference.view(np.uint8)).sum()
        assert abs(int(flips) - 256 * 32) < 5 * math.sqrt(256 * 16)


def flipped_inputs() -> Iterator[tuple[tuple[int, int, int], tuple[int, int, int]]]:
    """Yield (seed, choice, position) and the same with one bit flipped."""
    base = (123456789, 3, 777)
    for place, width in ((0, 64), (1, 32), (2, 31)):
        for bit in range(width):
            yield base, tuple(value ^ (1 << bit) if index == place else value for index, value in enumerate(base))


@sanitize
def test_uniform_and_gumbel_are_bounded() -> None:
    """The extreme words give numbers strictly inside (0, 1) and the noise that the pruning relies on."""
    uniform = declare("glint_testing_open_uniform", c_double, c_uint64)
    gumbel = declare("glint_testing_gumbel", c_double, c_uint64)
    assert uniform(0) == 2.0**-53
    assert uniform(2**64 - 1) == 1 - 2.0**-53
    assert gumbel(0) == pytest.approx(-math.log(53 * math.log(2)))
    assert gumbel(2**64 - 1) == pytest.approx(53 * math.log(2))
    assert gumbel(2**64 - 1) - gumbel(0) < 40.35
    for bits in random_bits(3, 0, 0, 200).tolist():
        assert gumbel(bits) == pytest.approx(-math.log(-math.log(uniform(bits))))


@sanitize
@pytest.mark.parametrize("vocab_size", [1, 5, 128, 1001, 151_552])
@pytest.mark.parametrize("spread", [0.01, 4.0, 60.0])
def test_logprobs_are_the_raw_log_softmax(vocab_size: int, spread: float) -> None:
    """Log-probabilities come from the raw logits, whatever changes the choice; the best are listed in order."""
    settings = {"has_logprobs": 1, "num_logprobs": MAX_TOP, "repetition_penalty": 1.5, "temperature": 0.8}
    row = replace(random_row(2, vocab_size, spread), settings=settings)
    expected = log_softmax(row.logits)
    result = row.sample()
    order = np.lexsort((np.arange(vocab_size), -row.logits))[:MAX_TOP]
    tokens, logprobs = result.tops()
    assert tokens == order.tolist()
    np.testing.assert_allclose(logprobs, expected[order], rtol=2e-7, atol=1e-6)
    assert result.logprob == pytest.approx(expected[result.token], rel=2e-7, abs=1e-6)
    prompt = prompt_logprobs(row.logits, vocab_size - 1, 3)
    assert prompt.token == vocab_size - 1
    assert prompt.logprob == pytest.approx(expected[-1], rel=2e-7, abs=1e-6)
    assert prompt.tops()[0] == order[:3].tolist()


@sanitize
def test_logprobs_are_accurate_to_a_float() -> None:
    """Over all gaps the exponential is good to about one rounding of a float."""
    for gap in np.linspace(0, 4, 1500, dtype=np.float32):
        logits = np.array([0, -gap, -gap], dtype=np.float32)
        assert prompt_logprobs(logits, 0, 0).logprob == pytest.approx(log_softmax(logits)[0], rel=0, abs=1.2e-7)


@sanitize
def test_logprob_ties_and_zero_probabilities() -> None:
    """Equal logits are listed by lower id, and tokens of probability zero are not listed."""
    logits = np.full(300, -np.inf, dtype=np.float32)
    logits[[3, 150, 299]] = [1.0, 2.0, 1.0]
    result = prompt_logprobs(logits, 0, 5)
    assert result.tops()[0] == [150, 3, 299]
    assert result.logprob == -INFINITY
    assert prompt_logprobs(np.zeros(300), 9, 4).tops()[0] == [0, 1, 2, 3]
    assert prompt_logprobs(np.zeros(300), 9, 0).top_count == 0
    silent = Row(np.zeros(300), {"num_logprobs": 5}).sample()
    assert (silent.top_count, silent.logprob) == (0, 0.0)


@sanitize
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab_size", [1, 128, 300])
def test_rows_that_are_not_finite_fail(temperature: float, vocab_size: int) -> None:
    """A NaN of either sign or plus infinity anywhere, or nothing above minus infinity, fails the row."""
    settings = {"temperature": temperature, "has_logprobs": 1, "num_logprobs": 2}
    wrong = [math.nan, math.copysign(math.nan, -1.0), INFINITY]
    for value in wrong:
        for place in {0, vocab_size // 2, vocab_size - 1}:
            logits = np.zeros(vocab_size, dtype=np.float32)
            logits[place] = value
            assert Row(logits, settings).sample().failure == abi.FAILURE_NOT_FINITE
            assert prompt_logprobs(logits, 0, 2).failure == abi.FAILURE_NOT_FINITE
    nothing = np.full(vocab_size, -np.inf, dtype=np.float32)
    assert Row(nothing, settings).sample().failure == abi.FAILURE_NOT_FINITE
    nothing[-1] = -3e38
    result = Row(nothing, settings).sample()
    assert (result.failure, result.token) == (abi.FAILURE_NONE, vocab_size - 1)


@sanitize
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.9}])
def test_masks(settings: dict[str, Any]) -> None:
    """Forbidden tokens are never drawn, and nothing allowed fails the row alone."""
    logits = np.random.default_rng(0).normal(0, 1, 333).astype(np.float32)
    for token in (0, 31, 32, 332):
        allowed = np.zeros(333, dtype=bool)
        allowed[token] = True
        assert Row(logits, settings, bias={1: 100.0}, allowed=allowed).sample().token == token
    nothing = np.zeros(333, dtype=bool)
    assert Row(logits, settings, allowed=nothing).sample().failure == abi.FAILURE_NOTHING_ALLOWED
    nothing[7], logits[7] = True, -np.inf
    assert Row(logits, settings, allowed=nothing).sample().failure == abi.FAILURE_NOTHING_ALLOWED
    some = np.random.default_rng(1).random(333) < 0.1
    drawn = Row(logits, settings, allowed=some).sample_positions(500)
    assert some[drawn].all()


@sanitize
def test_extreme_rows() -> None:
    """One-hot, huge and tiny values, and extreme temperatures and penalties keep to the definition."""
    one_hot = np.zeros(1000, dtype=np.float32)
    one_hot[123] = 1e4
    assert set(Row(one_hot, {"top_p": 0.9}).sample_positions(50).tolist()) == {123}
    assert set(Row(one_hot).sample_positions(50).tolist()) == {123}
    huge = np.linspace(-3.4e38, 3.4e38, 1000).astype(np.float32)
    for settings in ({}, {"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.0}, {"temperature": 1e-45}):
        result = Row(huge, {**settings, "has_logprobs": 1}).sample()
        assert (result.token, result.logprob) == (999, 0.0)
    spread = np.random.default_rng(5).normal(0, 5, 1000).astype(np.float32)
    assert set(Row(spread, {"temperature": 1e-45}).sample_positions(20).tolist()) == {int(spread.argmax())}
    hot = Row(spread, {"temperature": 3e38}).sample_positions(20_000) // 100
    assert chi_square_is_plausible(np.bincount(hot, minlength=10), np.full(10, 2000.0))
    raised = Row(spread, {"temperature": 0.0, "repetition_penalty": 1e-38}, history=(10, 20, 30), prompt_count=3)
    best = max((10, 20, 30), key=lambda token: spread[token])
    assert raised.sample().token == (best if spread[best] > 0 else int(spread.argmax()))


def problem(vocab_size: int = 100, **changes: Any) -> str:
    """Return what the native validation says of settings that are neutral but for `changes`."""
    bias = changes.pop("bias", {})
    sampling, alive = native_sampling({}, bias)
    for name, value in changes.items():
        setattr(sampling, name, value)
    text = create_string_buffer(512)
    function = declare("glint_testing_sampling_problem", c_int32, POINTER(abi.Sampling), c_int32, type(text), c_int32)
    function(byref(sampling), vocab_size, text, len(text))
    del alive
    return text.value.decode()


@sanitize
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"temperature": -0.5}, "temperature is -0.5; it must be a finite number, 0 or more"),
        ({"temperature": math.nan}, "temperature is nan;"),
        ({"temperature": INFINITY}, "temperature is inf;"),
        ({"top_p": 0.0}, "top_p is 0; it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5;"),
        ({"top_p": math.nan}, "top_p is nan;"),
        ({"min_p": -0.1}, "min_p is -0.1; it must be from 0 to 1"),
        ({"min_p": 1.25}, "min_p is 1.25;"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0; it must be a finite number above 0"),
        ({"repetition_penalty": INFINITY}, "repetition_penalty is inf;"),
        ({"frequency_penalty": 2.5}, "frequency_penalty is 2.5; it must be a number from -2 to 2"),
        ({"presence_penalty": -2.5}, "presence_penalty is -2.5;"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan;"),
        ({"top_k": -1}, "top_k is -1; it must be 0 (off) or more"),
        ({"has_logprobs": 2}, "has_logprobs is 2; it must be 0 or 1"),
        ({"num_logprobs": 21}, "num_logprobs is 21; it must be 0 to 20"),
        ({"num_prompt_logprobs": -1}, "num_prompt_logprobs is -1;"),
        ({"struct_bytes": 4}, "struct_bytes is 4; it must be 80"),
        ({"bias_count": -1}, "bias_count is -1; it must be 0 to 1024"),
        ({"bias_count": 1025}, "bias_count is 1025;"),
        ({"bias_count": 1, "bias_tokens": None}, "bias_count is 1; it must be 0 where bias_tokens"),
        ({"bias_count": 1, "bias_values": None}, "is null"),
        ({"bias": {3: 1.0, 100: 1.0}}, "bias_tokens[1] is 100; it must be 0 to 99"),
        ({"bias": {-1: 1.0}}, "bias_tokens[0] is -1;"),
        ({"bias": {5: 100.5}}, "bias_values[0] is 100.5; it must be a number from -100 to 100"),
        ({"bias": {5: math.nan}}, "bias_values[0] is nan;"),
    ],
)
def test_validation_names_field_value_and_range(changes: dict[str, Any], text: str) -> None:
    """Each wrong field is refused with its name, its value and what is allowed."""
    assert text in problem(**changes)


@sanitize
def test_validation_accepts_the_limits() -> None:
    """Values at the edges of the ranges are accepted."""
    assert problem() == ""
    assert problem(temperature=0.0, top_p=1e-6, min_p=1.0, top_k=2**31 - 1, num_logprobs=20, has_logprobs=1) == ""
    assert problem(frequency_penalty=2.0, presence_penalty=-2.0, repetition_penalty=1e-30) == ""
    assert problem(vocab_size=1024, bias=dict.fromkeys(range(1024), -100.0)) == ""
