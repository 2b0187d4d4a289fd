"""Streamed text: detokenising against decoding at once, stop strings against a search over the whole text."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glint.errors import TextError
from glint.text.tokenizer import Detokenizer, StopStrings, Tokenizer
from tests.pure.text_folder import PLAIN_TOKENS, ROLE_TOKENS, build_tokenizer, write_tokenizer

REFERENCE = build_tokenizer()
NUM_IDS = REFERENCE.get_vocab_size(with_added_tokens=True)
ADDED_IDS = [REFERENCE.token_to_id(token) for token in ROLE_TOKENS + PLAIN_TOKENS]
BYTE_IDS = [index for index in range(NUM_IDS) if index not in ADDED_IDS and len(REFERENCE.id_to_token(index)) == 1]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    """The pieces of a detokenizer, that of `finish` last."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@cache
def ids_by_byte(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The token of each single byte."""
    return {tokenizer.token_bytes(token_id): token_id for token_id in BYTE_IDS}


def ids_of_bytes(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    """One token for each byte."""
    return [ids_by_byte(tokenizer)[bytes([byte])] for byte in raw]


@given(
    ids=st.lists(st.integers(0, NUM_IDS + 3) | st.sampled_from(BYTE_IDS) | st.sampled_from(ADDED_IDS), max_size=40),
    skip=st.booleans(),
)
def test_pieces_are_the_text_decoded_at_once(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(stream(tokenizer, ids, skip)) == REFERENCE.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=20), skip=st.booleans())
def test_no_piece_ends_inside_a_character(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    raw = text.encode()
    pieces = stream(tokenizer, ids_of_bytes(tokenizer, raw), skip)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    emitted = 0
    for num_bytes, piece in enumerate(pieces[:-1], start=1):
        emitted += len(piece)
        whole = raw[:num_bytes].decode(errors="ignore")
        assert text[:emitted] == whole


@given(raw=st.binary(max_size=30))
def test_any_bytes_stream_as_they_decode(tokenizer: Tokenizer, raw: bytes) -> None:
    ids = ids_of_bytes(tokenizer, raw)
    assert "".join(stream(tokenizer, ids, True)) == REFERENCE.decode(ids)


def test_special_tokens_inside_a_character(tokenizer: Tokenizer) -> None:
    first, second = ids_of_bytes(tokenizer, "é".encode())
    user = REFERENCE.token_to_id("<|user|>")
    assert stream(tokenizer, [first, user, second], True) == ["", "", "é", ""]
    assert stream(tokenizer, [first, user, second], False) == ["", "\ufffd<|user|>", "\ufffd", ""]


def test_hopeless_bytes_are_not_hoarded(tokenizer: Tokenizer) -> None:
    (continuation,) = ids_of_bytes(tokenizer, b"\x80")
    detokenizer = Detokenizer(tokenizer)
    assert all(detokenizer.push(continuation) == "\ufffd" for _ in range(1000))
    assert detokenizer.finish() == ""


def test_an_unfinished_character_ends_as_a_replacement(tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, ids_of_bytes(tokenizer, b"a\xf0\x9f\x98"), True) == ["a", "", "", "", "\ufffd"]


def search_at_once(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The text up to the stop string that is complete first, of two that end together the longer one."""
    for end in range(1, len(text) + 1):
        for begin in range(end):
            if text[begin:end] in stops:
                return text[: end if include else begin], True
    return text, False


@given(
    text=st.text("ab<", max_size=24),
    stops=st.lists(st.text("ab<", min_size=1, max_size=5), max_size=4),
    cuts=st.sets(st.integers(0, 24)),
    include=st.booleans(),
)
def test_stops_are_those_of_a_search_at_once(text: str, stops: list[str], cuts: set[int], include: bool) -> None:
    expected, is_stopped = search_at_once(text, stops, include)
    matcher = StopStrings(stops, include_stop=include)
    borders = [0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]
    emitted, found, seen = "", False, 0
    for begin, end in pairwise(borders):
        piece, found = matcher.push(text[begin:end])
        emitted += piece
        seen = end
        if found:
            break
        held = text[len(emitted) : seen]
        openings = {stop[:length] for stop in stops for length in range(len(stop))} | {""}
        longest = max((opening for opening in openings if text[:seen].endswith(opening)), key=len)
        assert held == longest
    assert (emitted + matcher.finish(), found) == (expected, is_stopped)


@pytest.mark.parametrize(("stops", "emitted", "matched"), [(["d", "b"], "a", "b"), (["bc", "abc", "c"], "", "abc")])
def test_the_stop_that_is_complete_first_ends_the_text(stops: list[str], emitted: str, matched: str) -> None:
    matcher = StopStrings(stops)
    assert matcher.push("abcd") == (emitted, True)
    assert matcher.matched == matched


def test_nothing_follows_a_stop() -> None:
    matcher = StopStrings(["END"])
    assert matcher.push("one EN") == ("one ", False)
    assert matcher.push("D two") == ("", True)
    assert matcher.push("three") == ("", True)
    assert matcher.finish() == ""


@pytest.mark.parametrize("stops", ["END", [""], ["a", ""], [3], [None]])
def test_what_cannot_stop_is_refused(stops: object) -> None:
    with pytest.raises(TextError, match="stop strings"):
        StopStrings(stops)
