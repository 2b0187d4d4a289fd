"""What several ranks take and send: plan and counters agree, and the collectives are those that the bench counts."""

import pytest

from glint.bench.rank_collectives import SAMPLE_RESULT_BYTES, count_collectives
from glint.bench.rank_shapes import RankShape, shape_rank
from glint.checkpoint.placement import ExpertLayout
from glint.native.library import NativeEngine, choose_library, load_library, plan_engine
from tests.cpu.random_asks import random_prompt
from tests.cpu.rank_engine import LAYOUTS, SHARDING, answers_of, rank_model
from tests.cpu.small_engine import Session, engine_options, make_ask, open_engine

pytestmark = pytest.mark.sanitize

FLOAT_BYTES = 4
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_count = pytest.mark.parametrize("num_ranks", [2, 4, 8])


def sent_in_a_step(engine: NativeEngine, tokens: int) -> tuple[int, int]:
    """Collectives and bytes of the first rank in one step of a prompt that ends with a sampled token."""
    session = Session(engine)
    request_id = session.add(make_ask(random_prompt(tokens, tokens), 2))
    before = engine.stats()
    session.step([(request_id, tokens)])
    after = engine.stats()
    session.free(request_id)
    return (
        after.collectives_run - before.collectives_run,
        after.collective_bytes - before.collective_bytes,
    )


def tail_bytes(shape: RankShape) -> int:
    """What the bench counts for logits and results of one sampled row: the mean over all ranks."""
    logits = shape.model.vocab_size * FLOAT_BYTES
    return (logits + SAMPLE_RESULT_BYTES) * (shape.tp - 1) // shape.tp


@every_layout
@every_count
@pytest.mark.parametrize("row_slices", [8, 16])
def test_a_plan_says_what_the_ranks_then_take(layout: str, num_ranks: int, row_slices: int) -> None:
    library = load_library(choose_library("cpu"))
    checkpoint = rank_model(moe_intermediate_size=32, n_routed_experts=16)
    changes = {"num_ranks": num_ranks, "row_slices": row_slices, "expert_layout": LAYOUTS[layout], "num_threads": 8}
    options = engine_options(checkpoint, **changes)
    plan = plan_engine(library, options)
    with open_engine(checkpoint, library, **changes) as engine:
        stats = engine.stats()
    assert stats.workspace_bytes == plan.workspace_bytes
    assert stats.page_bytes == options.num_pages * plan.bytes_per_page
    assert stats.kernels == plan.kernels
    assert stats.weight_bytes_placed == plan.weight_bytes == 0


def test_one_rank_sends_nothing() -> None:
    with open_engine(rank_model(), row_slices=8) as engine:
        assert sent_in_a_step(engine, 40) == (0, 0)


@every_layout
@every_count
@pytest.mark.parametrize("tokens", [1, 31, 64])
def test_a_replicated_step_sends_every_part_to_every_rank(layout: ExpertLayout, num_ranks: int, tokens: int) -> None:
    """Two parts per layer; the first rank also sends the results, and no logits."""
    checkpoint = rank_model()
    exchanges = 2 * checkpoint.config.num_layers
    parts = exchanges * (num_ranks - 1) * tokens * checkpoint.config.hidden_size * FLOAT_BYTES
    results = SAMPLE_RESULT_BYTES * (num_ranks - 1)
    options = {"num_ranks": num_ranks, "row_slices": num_ranks, "expert_layout": LAYOUTS[layout]}
    with open_engine(checkpoint, sequence_parallel=SHARDING["replicated"], **options) as engine:
        collectives, sent = sent_in_a_step(engine, tokens)
    assert collectives == exchanges + 2
    assert sent == parts + results


@every_layout
@every_count
@pytest.mark.parametrize("tokens", [1, 16])
def test_the_bench_counts_what_few_rows_send(layout: ExpertLayout, num_ranks: int, tokens: int) -> None:
    """The first rank sends the results and no logits, where the bench counts the mean over ranks of both."""
    checkpoint = rank_model()
    shape = shape_rank(checkpoint.config, num_ranks, layout)
    expected = count_collectives(shape, tokens, 1)
    results = SAMPLE_RESULT_BYTES * (num_ranks - 1)
    options = {"num_ranks": num_ranks, "row_slices": num_ranks, "expert_layout": LAYOUTS[layout]}
    with open_engine(checkpoint, sequence_parallel=SHARDING["replicated"], **options) as engine:
        collectives, sent = sent_in_a_step(engine, tokens)
    assert collectives == expected.collectives
    assert sent == expected.bytes_sent - tail_bytes(shape) + results


@every_layout
@every_count
@pytest.mark.parametrize("tokens", [1, 31, 100])
def test_a_sharded_step_sends_less(layout: ExpertLayout, num_ranks: int, tokens: int) -> None:
    """Per layer two sums of which a rank keeps its rows, and two gathers of normed rows; at the end the rows."""
    config = rank_model().config
    row_bytes = config.hidden_size * FLOAT_BYTES
    own = min(-(-tokens // num_ranks), tokens)
    sums, gathers = 2 * config.num_layers, 2 * config.num_layers + 1
    rows = sums * (tokens - own) + gathers * own * (num_ranks - 1)
    options = {"num_ranks": num_ranks, "row_slices": num_ranks, "expert_layout": LAYOUTS[layout]}
    with open_engine(rank_model(), sequence_parallel=SHARDING["sharded"], **options) as engine:
        collectives, sent = sent_in_a_step(engine, tokens)
    assert collectives == sums + gathers + 2
    assert sent == rows * row_bytes + SAMPLE_RESULT_BYTES * (num_ranks - 1)


@every_count
def test_auto_shards_steps_of_many_tokens(num_ranks: int) -> None:
    options = {"num_ranks": num_ranks, "row_slices": num_ranks}
    sent = {}
    for name, sharding in SHARDING.items():
        with open_engine(rank_model(), sequence_parallel=sharding, **options) as engine:
            sent[name] = [sent_in_a_step(engine, tokens) for tokens in (31, 32)]
    assert sent["auto"] == [sent["replicated"][0], sent["sharded"][1]]
    assert sent["replicated"] != sent["sharded"]


@every_layout
@every_count
@pytest.mark.parametrize("tokens", [1, 20])
def test_experts_read_are_counted_at_every_number_of_ranks(layout: str, num_ranks: int, tokens: int) -> None:
    """Layout tp: a rank reads a part of each chosen expert, and the first counts; ep: each counts its own."""
    counts = []
    for ranks in (1, num_ranks):
        options = {"num_ranks": ranks, "row_slices": 8, "expert_layout": LAYOUTS[layout]}
        with open_engine(rank_model(n_routed_experts=16), **options) as engine:
            sent_in_a_step(engine, tokens)
            counts.append(engine.stats().experts_read)
    assert counts[0] == counts[1] > 0


def test_a_request_for_prompt_logprobs_adds_its_logits() -> None:
    ask = make_ask(random_prompt(1, 30), 1, has_prompt_logprobs=1, num_prompt_logprobs=2)
    options = {
        "num_ranks": 2,
        "row_slices": 2,
        "max_step_items": 8,
        "sequence_parallel": SHARDING["replicated"],
    }
    with open_engine(rank_model(), **options) as engine:
        session = Session(engine)
        request_id = session.add(ask)
        session.run()
        assert [session.free(request_id)] == answers_of(rank_model(), [ask], row_slices=2)
        pieces = -(-29 // 8)
        assert engine.stats().collectives_run == 2 * 3 + 2 + 2 * pieces
