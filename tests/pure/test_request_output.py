"""What a request makes of its part of a step: text, stops, log-probabilities, finish reasons."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from glint.engine.request import ActiveRequest, OutputText
from glint.native import abi
from glint.native.library import ItemOutcome
from glint.sampling import SamplingParams
from glint.text.tokenizer import Tokenizer

EOS = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer without merges: one token per byte, and one special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<|end|>"])
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|end|>").save_pretrained(folder)
    return Tokenizer(Path(folder))


def make_request(
    tokenizer: Tokenizer | None, prompt_tokens: tuple[int, ...] = (1, 2, 3), **options: Any
) -> ActiveRequest:
    params = SamplingParams(**options)
    return ActiveRequest(
        request_id=7,
        prompt_tokens=prompt_tokens,
        params=params,
        seed=1,
        choice_index=0,
        cache_salt=0,
        stop_tokens=(EOS, *params.stop_token_ids),
        max_new_tokens=100,
        text=None if tokenizer is None else OutputText(tokenizer, params),
    )


def outcome(tokens: tuple[int, ...], finish_reason: int = abi.FINISH_NONE, **fields: Any) -> ItemOutcome:
    values = {"failure": 0, "cached_tokens": 0, "computed_tokens": 0, "logprobs": {}} | fields
    return ItemOutcome(request_id=99, tokens=tokens, finish_reason=finish_reason, **values)


def run(request: ActiveRequest, tokens: list[int], last: int = abi.FINISH_LENGTH) -> tuple[str, list[int], str | None]:
    """Feed tokens one step each, ending with `last`, until the request ends."""
    text, kept, reason = "", [], None
    for index, token in enumerate(tokens):
        output = request.take_in(outcome((token,), last if index == len(tokens) - 1 else abi.FINISH_NONE))
        text += output.text
        kept += output.token_ids
        reason = output.finish_reason
        if reason is not None:
            break
    return text, kept, reason


def test_text_is_the_decoded_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("Grüße, 世界 🙂")
    assert run(make_request(tokenizer), tokens) == ("Grüße, 世界 🙂", tokens, "length")


def test_a_stop_token_ends_the_text_before_it(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("abc")
    assert run(make_request(tokenizer), [*tokens, EOS], abi.FINISH_STOP) == ("abc", [*tokens, EOS], "stop")
    request = make_request(tokenizer, stop_token_ids=[tokens[-1]])
    assert run(request, tokens, abi.FINISH_STOP) == ("ab", tokens, "stop")
    request = make_request(tokenizer, stop_token_ids=[tokens[-1]], include_stop_str_in_output=True)
    assert run(request, tokens, abi.FINISH_STOP) == ("abc", tokens, "stop")


def test_an_end_of_sequence_token_is_no_text_even_where_special_tokens_are_shown(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("abc")
    request = make_request(tokenizer, skip_special_tokens=False)
    assert run(request, [*tokens, EOS], abi.FINISH_STOP) == ("abc", [*tokens, EOS], "stop")
    request = make_request(tokenizer, skip_special_tokens=False, include_stop_str_in_output=True)
    assert run(request, [*tokens, EOS], abi.FINISH_STOP) == ("abc<|end|>", [*tokens, EOS], "stop")


@pytest.mark.parametrize(("skips", "text"), [(True, "abcabc"), (False, "abc<|end|>abc<|end|>")])
def test_a_special_token_that_ends_nothing_is_text_where_they_are_shown(
    tokenizer: Tokenizer, skips: bool, text: str
) -> None:
    tokens = [*tokenizer.encode("abc"), EOS] * 2
    request = make_request(tokenizer, skip_special_tokens=skips, ignore_eos=True)
    assert run(request, tokens, abi.FINISH_LENGTH) == (text, tokens, "length")


def test_a_stop_string_ends_the_request(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two three")
    used = tokens[: len("one two")]
    assert run(make_request(tokenizer, stop=" two"), tokens) == ("one", used, "stop")
    request = make_request(tokenizer, stop=" two", include_stop_str_in_output=True)
    assert run(request, tokens) == ("one two", used, "stop")


def test_what_ended_the_request_is_named(tokenizer: Tokenizer) -> None:
    first, last = tokenizer.encode("ab")
    wanted = [({}, EOS, None), ({"stop_token_ids": [last]}, last, last), ({"stop": "b"}, last, "b")]
    for options, token, reason in wanted:
        request = make_request(tokenizer, **options)
        assert request.take_in(outcome((first,))).stop_reason is None
        ended = request.take_in(outcome((token,), abi.FINISH_NONE if "stop" in options else abi.FINISH_STOP))
        assert (ended.finish_reason, ended.stop_reason) == ("stop", reason)
    full = make_request(tokenizer, stop_token_ids=[last]).take_in(outcome((last,), abi.FINISH_LENGTH))
    assert (full.finish_reason, full.stop_reason) == ("length", None)


def test_text_held_back_for_a_stop_string_comes_in_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one tw")
    assert run(make_request(tokenizer, stop=" two"), tokens) == ("one tw", tokens, "length")


def test_tokens_after_a_stop_string_in_the_same_step_are_dropped(tokenizer: Tokenizer) -> None:
    tokens = tuple(tokenizer.encode("a.b"))
    logprobs = {3 + index: {token: -1.0} for index, token in enumerate(tokens)}
    request = make_request(tokenizer, stop=".", logprobs=0)
    output = request.take_in(outcome(tokens, logprobs=logprobs))
    assert (output.text, output.token_ids, output.finish_reason) == ("a", tokens[:2], "stop")
    assert output.logprobs == ({tokens[0]: -1.0}, {tokens[1]: -1.0})


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = make_request(None).take_in(outcome((5,), abi.FINISH_STOP))
    assert (output.text, output.token_ids, output.finish_reason, output.logprobs) == (None, (5,), "stop", None)


def test_prompt_logprobs_of_several_chunks_come_with_the_first_token() -> None:
    request = make_request(None, logprobs=1, prompt_logprobs=0)
    assert request.take_in(outcome((), cached_tokens=0, logprobs={1: {2: -0.5}})) is None
    first = request.take_in(outcome((9,), logprobs={2: {3: -0.25}, 3: {9: -1.0, 8: -0.5}}))
    assert first.prompt_logprobs == (None, {2: -0.5}, {3: -0.25})
    assert first.logprobs == ({9: -1.0, 8: -0.5},)
    second = request.take_in(outcome((8,), logprobs={4: {8: -2.0}}))
    assert (second.prompt_logprobs, second.logprobs) == (None, ({8: -2.0},))


def test_only_the_first_choice_asks_for_prompt_logprobs() -> None:
    request = make_request(None, prompt_logprobs=5)
    assert request.to_native().sampling.contents.num_prompt_logprobs == 5
    request.choice_index = 1
    sampling = request.to_native().sampling.contents
    assert (sampling.has_prompt_logprobs, sampling.num_prompt_logprobs, sampling.choice_index) == (0, 0, 1)


def test_cached_tokens_are_those_of_the_first_step_also_after_preemption() -> None:
    request = make_request(None)
    assert request.take_in(outcome((), cached_tokens=16)) is None
    assert request.take_in(outcome((9,), cached_tokens=48)).cached_tokens == 16


def test_failures_say_why() -> None:
    failed = make_request(None).take_in(outcome((), abi.FINISH_FAILED, failure=abi.FAILURE_NOT_FINITE))
    assert failed.finish_reason == "failed"
    assert "NaN" in failed.failure
    given_up = make_request(None, logprobs=1).fail("no room")
    assert (given_up.finish_reason, given_up.failure, given_up.logprobs) == ("failed", "no room", ())


def test_everything_asked_reaches_the_native_request() -> None:
    request = make_request(
        None,
        prompt_tokens=(4, 5),
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        repetition_penalty=1.5,
        frequency_penalty=0.75,
        presence_penalty=-0.5,
        logit_bias={6: -1.5, 7: 2.0},
        logprobs=4,
        stop_token_sequences=[[8, 9], [10]],
    )
    request.seed, request.cache_salt = 2**64 - 1, 2**63 - 1
    native = request.to_native()
    sampling = native.sampling.contents
    assert (sampling.seed, native.cache_salt) == (2**64 - 1, 2**63 - 1)
    penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    assert penalties == (1.5, 0.75, -0.5)
    assert native.prompt_tokens[: native.prompt_count] == [4, 5]
    assert native.stop_tokens[: native.stop_token_count] == [EOS]
    assert native.stop_sequence_tokens[:3] == [8, 9, 10]
    assert native.stop_sequence_lengths[: native.stop_sequence_count] == [2, 1]
    assert native.max_new_tokens == 100
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 3, 0.125)
    assert (sampling.has_logprobs, sampling.num_logprobs, sampling.has_prompt_logprobs) == (1, 4, 0)
    assert sampling.bias_tokens[: sampling.bias_count] == [6, 7]
    assert sampling.bias_values[: sampling.bias_count] == [-1.5, 2.0]


def test_the_text_of_the_least_number_of_tokens_is_not_searched_for_stop_strings(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("abcabcabc")
    texts = ["a", "a", "abca", "abca", "abca", "abcabca", "abcabca", "abcabca", "abcabcabc", "abcabcabc"]
    for least, text in enumerate(texts):
        request = make_request(tokenizer, stop="bc", min_tokens=least)
        assert run(request, tokens)[0] == text, least


@pytest.mark.parametrize(("text", "kept", "accepted"), [("abXYcd", 4, 4), ("XYabcd", 2, 2), ("abcdXY", 6, 5)])
def test_drafts_behind_a_stop_string_count_as_rejected(
    tokenizer: Tokenizer, text: str, kept: int, accepted: int
) -> None:
    """The tokens of a step are its right drafts and, as the last, the token that was sampled behind them."""
    request = make_request(tokenizer, stop=["XY"])
    request.verified_tokens = 7
    output = request.take_in(outcome(tuple(tokenizer.encode(text))))
    assert output is not None and output.finish_reason == "stop"
    assert (len(output.token_ids), output.draft_tokens, output.accepted_tokens) == (kept, 7, accepted)
