"""Speculation in the native engine: the same answers bit for bit, drafts from the right inputs, nothing left behind.

The models have four tokens, so that a random MTP layer is often right.
"""

import itertools
import random
from functools import cache
from pathlib import Path

import pytest

from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.native import abi
from tests.cpu.kernel_sets import FAST_KERNELS, require_kernels
from tests.cpu.rank_engine import SHARDING, deferring_engine
from tests.cpu.small_engine import SMALL_SHAPE, Answer, Ask, Session, answer_all, make_ask, open_engine
from tests.cpu.speculation import (
    MAX_DRAFTS,
    PAGE_TOKENS,
    VOCAB_SIZE,
    Counts,
    assert_same,
    draft_asks,
    expected_drafts,
    speculate,
)
from tests.reference.checkpoints import Weights, make_checkpoint
from tests.reference.numpy_model import NumpyModel

pytestmark = pytest.mark.sanitize


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Weights, Path]:
    """Checkpoints with an MTP layer, by their weights."""
    root = tmp_path_factory.mktemp("speculation")
    kinds: tuple[Weights, ...] = ("bf16", "fp8_channel")
    shape = SMALL_SHAPE | {"vocab_size": VOCAB_SIZE}
    return {kind: make_checkpoint(root / kind, "glm47", kind, mtp="with copies", **shape) for kind in kinds}


@cache
def open_folder(folder: Path) -> Checkpoint:
    """The checkpoint of a folder."""
    return open_checkpoint(folder)


def plain_answers(checkpoint: Checkpoint, asks: list[Ask], **changes: int) -> list[Answer]:
    """What an engine without the MTP layer answers."""
    with open_engine(checkpoint, **changes) as engine:
        return answer_all(engine, asks)


@pytest.mark.parametrize("weights", ["bf16", "fp8_channel"])
@pytest.mark.parametrize("kernels", ["exact", *FAST_KERNELS])
def test_answers_are_those_without(folders: dict[Weights, Path], weights: Weights, kernels: str) -> None:
    require_kernels(kernels)
    checkpoint, asks = open_folder(folders[weights]), draft_asks(28, 1)
    changes = {"kernels": getattr(abi, f"KERNELS_{kernels.upper()}"), "num_threads": 2}
    expected = plain_answers(checkpoint, asks, **changes)
    counts = Counts()
    with open_engine(checkpoint, max_draft_tokens=MAX_DRAFTS, **changes) as engine:
        assert_same(engine, asks, expected, 0, counts)
    assert counts.token_counts >= {1, 2, 3} and 0 < counts.accepted < counts.verified < counts.made


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_those_without_where_results_are_read_late(folders: dict[Weights, Path], seed: int) -> None:
    checkpoint, asks = open_folder(folders["fp8_channel"]), draft_asks(20, 10 + seed)
    expected = plain_answers(checkpoint, asks)
    with deferring_engine(checkpoint, max_draft_tokens=MAX_DRAFTS) as engine:
        assert_same(engine, asks, expected, seed, Counts())


@pytest.mark.parametrize(("num_ranks", "sharding"), [(2, "replicated"), (2, "sharded"), (4, "auto")])
def test_answers_of_ranks_are_those_of_one(folders: dict[Weights, Path], num_ranks: int, sharding: str) -> None:
    checkpoint, asks = open_folder(folders["fp8_channel"]), draft_asks(16, 20)
    expected = plain_answers(checkpoint, asks, row_slices=4)
    changes = {"num_ranks": num_ranks, "row_slices": 4, "sequence_parallel": SHARDING[sharding]}
    counts = Counts()
    with open_engine(checkpoint, max_draft_tokens=MAX_DRAFTS, **changes) as engine:
        assert_same(engine, asks, expected, 3, counts)
    assert counts.accepted > 0


@pytest.mark.parametrize(
    ("prompt_tokens", "chunk", "pauses"),
    [(21, 64, ()), (21, 5, ()), (2 * PAGE_TOKENS, PAGE_TOKENS, ()), (12, 64, (0, 1, 2)), (11, 64, (3, 6, 7))],
)
def test_drafts_are_those_of_numpy(
    folders: dict[Weights, Path], prompt_tokens: int, chunk: int, pauses: tuple[int, ...]
) -> None:
    """In prompts, whole and in chunks, in decodes, behind accepted and rejected drafts, and at the edges of pages.

    Behind steps without drafts the layer begins anew.
    """
    folder = folders["bf16"]
    model = NumpyModel(folder)
    source = random.Random(prompt_tokens + chunk)
    prompt = [source.randrange(VOCAB_SIZE) for _ in range(prompt_tokens)]
    changes = {"kernels": abi.KERNELS_EXACT, "page_tokens": PAGE_TOKENS}
    seen: set[int] = set()
    first = 1
    with open_engine(open_folder(folder), max_draft_tokens=3, **changes) as engine:
        session = Session(engine)
        request_id = session.add(make_ask(prompt, 26))
        history = prompt
        for step in itertools.count():
            first = len(history) if step - 1 in pauses else first
            (item,) = session.step([(request_id, chunk)], [0 if step in pauses else 3]).items
            history = prompt + session.answers[request_id].tokens
            if item.finish_reason != abi.FINISH_NONE:
                break
            if not item.tokens or step in pauses:
                assert not item.drafts
                continue
            seen.add(len(item.tokens))
            left = prompt_tokens + 26 - 1 - len(history)
            assert list(item.drafts) == expected_drafts(model, history, first, min(3, left)), len(history)
            assert engine.stats().pages_held == -(-len(history) // PAGE_TOKENS)
    assert len(seen) > 1


@pytest.mark.parametrize(("undrafted_steps", "num_ranks"), [(0, 1), (0, 2), (1, 1), (99, 1)])
def test_a_cached_prefix_brings_what_the_layer_made_of_it(
    folders: dict[Weights, Path], undrafted_steps: int, num_ranks: int
) -> None:
    """Behind pages of which some were made without drafts the layer begins anew."""
    folder = folders["bf16"]
    model = NumpyModel(folder)
    prompt = [(3 * place + place // 5) % VOCAB_SIZE for place in range(21)]
    with open_engine(
        open_folder(folder), max_draft_tokens=3, kernels=abi.KERNELS_EXACT, num_ranks=num_ranks, row_slices=num_ranks
    ) as engine:
        session = Session(engine)
        first_id = session.add(make_ask(prompt, 14))
        for step in itertools.count():
            session.step([(first_id, 7)], [3 if step >= undrafted_steps else 0])
            if not session.running:
                break
        shared = (prompt + session.free(first_id).tokens)[: 4 * PAGE_TOKENS]
        longer = [*shared, 1, 2, 0]
        request_id = session.add(make_ask(longer, 8))
        (item,) = session.step([(request_id, 64)], [3]).items
        history = longer
        while item.finish_reason == abi.FINISH_NONE:
            history = longer + session.answers[request_id].tokens
            first = len(shared) + 1 if undrafted_steps else 1
            left = len(longer) + 8 - 1 - len(history)
            assert list(item.drafts) == expected_drafts(model, history, first, min(3, left)), len(history)
            (item,) = session.step([(request_id, 64)], [3]).items
        assert session.answers[request_id].cached_tokens == len(shared) == 4 * PAGE_TOKENS


def test_a_request_that_is_preempted_behind_a_rejected_draft_finds_none_of_it(folders: dict[Weights, Path]) -> None:
    """The last known token, whose place a rejected draft had, fills a page when the pages are taken."""
    checkpoint = open_folder(folders["fp8_channel"])
    asks = [make_ask([(3 * length + place) % VOCAB_SIZE for place in range(length)], 40) for length in range(1, 17)]
    num_preempted = 0
    with open_engine(checkpoint, max_draft_tokens=MAX_DRAFTS) as engine:
        for ask, expected in zip(asks, plain_answers(checkpoint, asks), strict=True):
            session = Session(engine)
            request_id = session.add(ask)
            num_drafts = 0
            while session.running:
                (item,) = session.step([(request_id, 64)], [MAX_DRAFTS]).items
                num_known = len(ask.prompt) + len(session.answers[request_id].tokens)
                if session.running and num_known % PAGE_TOKENS == 0 and len(item.tokens) <= num_drafts:
                    engine.release_pages(request_id)
                    num_preempted += 1
                num_drafts = len(item.drafts)
            assert session.free(request_id) == expected
    assert num_preempted > 5


@pytest.mark.parametrize("seed", range(3))
def test_pages_of_answers_serve_as_prefixes(folders: dict[Weights, Path], seed: int) -> None:
    """Nothing of a rejected draft is in the prefix cache."""
    checkpoint, asks = open_folder(folders["fp8_channel"]), draft_asks(12, 30 + seed)
    answers = plain_answers(checkpoint, asks)
    longer = [
        make_ask(ask.prompt + tuple(answer.tokens) + (number % VOCAB_SIZE,), 6, temperature=1.0, seed=number)
        for number, (ask, answer) in enumerate(zip(asks, answers, strict=True))
    ]
    expected = plain_answers(checkpoint, longer)
    with open_engine(checkpoint, max_draft_tokens=MAX_DRAFTS) as engine:
        session = Session(engine)
        for request_id in speculate(session, list(asks), random.Random(seed), Counts()):
            session.free(request_id)
        found = answer_all(engine, longer)
    assert found == expected
    assert sum(answer.cached_tokens for answer in found) > 12 * PAGE_TOKENS


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("role", "is_whole"), [(abi.ROLE_FINAL_NORM, True), (abi.ROLE_EMBEDDING, False)])
def test_a_draft_that_is_no_token_is_none(tmp_path: Path, role: int, is_whole: bool, num_ranks: int) -> None:
    """Logits of the layer that are no numbers end the drafts: behind one token of its embedding, or all of them."""
    shape = SMALL_SHAPE | {"vocab_size": VOCAB_SIZE}
    folder = make_checkpoint(tmp_path / "model", "glm47", "bf16", mtp="with its own", **shape)
    asks, changes = draft_asks(20, 40), {"num_ranks": num_ranks, "row_slices": 2, "num_threads": 2}
    expected = plain_answers(open_checkpoint(folder), asks, **changes)
    checkpoint = open_checkpoint(folder)
    (entry,) = (one for one in checkpoint.mtp_tensors if one.role == role)
    row_bytes = entry.byte_count // (1 if is_whole else VOCAB_SIZE)
    with checkpoint.files[entry.file_index].path.open("r+b") as file:
        file.seek(entry.file_offset + entry.byte_count - row_bytes)
        file.write(b"\xff" * row_bytes)
    counts = Counts()
    with open_engine(checkpoint, max_draft_tokens=MAX_DRAFTS, **changes) as engine:
        assert_same(engine, asks, expected, 5, counts)
        session = Session(engine)
        request_id = session.add(make_ask([1, 2], 12))
        while session.running:
            (item,) = session.step([(request_id, 64)], [MAX_DRAFTS]).items
            assert all(0 <= token < VOCAB_SIZE for token in item.drafts)
    assert (counts.made == 0) == is_whole


def test_a_request_without_drafts_does_not_run_the_layer(folders: dict[Weights, Path]) -> None:
    checkpoint, ask = open_folder(folders["fp8_channel"]), make_ask([1, 2, 3, 0, 1], 6)
    read = []
    for max_drafts in (0, MAX_DRAFTS):
        with open_engine(checkpoint, max_draft_tokens=max_drafts) as engine:
            answer_all(engine, [ask])
            read.append(engine.stats().experts_read)
    assert read[0] == read[1]
