"""A draft vocabulary: drafts are among the first tokens alone, on every number of ranks, and answers do not change."""

import random
from pathlib import Path

import pytest

from glint.checkpoint.table import open_checkpoint
from glint.native import abi
from tests.cpu.kernel_sets import FAST_KERNELS, require_kernels
from tests.cpu.small_engine import SMALL_SHAPE, Session, answer_all, make_ask, open_engine
from tests.cpu.speculation import MAX_DRAFTS, Counts, assert_same, draft_asks, expected_drafts
from tests.cpu.speculation import VOCAB_SIZE as FEW_TOKENS
from tests.reference.checkpoints import make_checkpoint
from tests.reference.numpy_model import NumpyModel

pytestmark = pytest.mark.sanitize

VOCAB_SIZE = 264
DRAFT_VOCAB_SIZE = 37
ROW_SLICES = 4
SAMPLING: tuple[dict[str, float], ...] = (
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.5, "top_p": 0.9, "seed": 2},
    {"temperature": 1.2, "top_k": 50, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "seed": 3},
    {"temperature": 2.0, "min_p": 0.01, "seed": 4},
)


def make_folder(folder: Path, vocab_size: int, mtp_vocab_size: int) -> Path:
    """A small checkpoint with an MTP layer that drafts among the first tokens."""
    shape = SMALL_SHAPE | {"vocab_size": vocab_size, "mtp_vocab_size": mtp_vocab_size}
    return make_checkpoint(folder, "glm47", "bf16", mtp="without copies", **shape)


def read_drafts(folder: Path, **changes: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The tokens and the drafts of every step of some requests, greedy and sampled."""
    source = random.Random(5)
    found = []
    changes = {"row_slices": ROW_SLICES} | changes
    with open_engine(open_checkpoint(folder), max_draft_tokens=3, **changes) as engine:
        session = Session(engine)
        for sampling in SAMPLING:
            prompt = [source.randrange(VOCAB_SIZE) for _ in range(19)]
            session.add(make_ask(prompt, 12, **sampling))
        while session.running:
            items = session.step([(request_id, 64) for request_id in session.running], [3] * len(session.running)).items
            found += [(tuple(item.tokens), tuple(item.drafts)) for item in items]
    return found


@pytest.mark.parametrize("kernels", ["exact", *FAST_KERNELS])
def test_drafts_stay_in_the_draft_vocabulary_on_every_number_of_ranks(tmp_path: Path, kernels: str) -> None:
    require_kernels(kernels)
    changes = {"kernels": getattr(abi, f"KERNELS_{kernels.upper()}")}
    whole = make_folder(tmp_path / "whole", VOCAB_SIZE, VOCAB_SIZE)
    first = make_folder(tmp_path / "first", VOCAB_SIZE, DRAFT_VOCAB_SIZE)
    found = read_drafts(first, **changes)
    drafts = {draft for _, made in found for draft in made}
    assert max(drafts) < DRAFT_VOCAB_SIZE and len(drafts) > 5
    assert max(draft for _, made in read_drafts(whole, **changes) for draft in made) >= DRAFT_VOCAB_SIZE
    for num_ranks in (2, 4):
        assert read_drafts(first, num_ranks=num_ranks, **changes) == found


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("mtp_vocab_size", [2, 3, DRAFT_VOCAB_SIZE, VOCAB_SIZE - 1])
def test_greedy_drafts_are_the_best_of_the_draft_vocabulary(
    tmp_path: Path, num_ranks: int, mtp_vocab_size: int
) -> None:
    """Also where ranks have no token of it, and where the shares of ranks differ."""
    folder = make_folder(tmp_path, VOCAB_SIZE, mtp_vocab_size)
    model = NumpyModel(folder)
    prompt = [random.Random(9).randrange(VOCAB_SIZE) for _ in range(13)]
    changes = {"kernels": abi.KERNELS_EXACT, "num_ranks": num_ranks, "row_slices": num_ranks}
    with open_engine(open_checkpoint(folder), max_draft_tokens=2, **changes) as engine:
        session = Session(engine)
        request_id = session.add(make_ask(prompt, 8))
        for _ in range(3):
            (item,) = session.step([(request_id, 64)], [2]).items
            history = prompt + session.answers[request_id].tokens
            assert list(item.drafts) == expected_drafts(model, history, 1, 2)


@pytest.mark.parametrize("mtp_vocab_size", [1, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_answers_are_those_without_drafts(tmp_path: Path, num_ranks: int, mtp_vocab_size: int) -> None:
    checkpoint, asks = open_checkpoint(make_folder(tmp_path, FEW_TOKENS, mtp_vocab_size)), draft_asks(20, 7)
    with open_engine(checkpoint, row_slices=ROW_SLICES) as engine:
        expected = answer_all(engine, asks)
    counts = Counts()
    changes = {"num_ranks": num_ranks, "row_slices": ROW_SLICES}
    with open_engine(checkpoint, max_draft_tokens=MAX_DRAFTS, **changes) as engine:
        assert_same(engine, asks, expected, 4, counts)
    assert 0 < counts.accepted < counts.verified
