"""Several ranks on one GPU: real NCCL, every sharding bitwise equal, near the CPU's ranks, and faults that end cleanly.

Needs NCCL 2.32.3 or newer, which lets ranks share a GPU ($GLINT_NCCL names the file). Kernels are the portable ones.
Ranks that share a GPU need a hardware queue per stream, whose number CUDA reads once, at its first call in a process.
"""

import os
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.native import abi
from glint.native.library import NativeEngine
from tests.cpu.small_engine import Ask, Session, answer_all, make_ask, run_at_random
from tests.gpu.sessions import PAGE_TOKENS, open_cuda, open_exact
from tests.reference.checkpoints import Weights, make_checkpoint

RANK_COUNTS = (2, 4, 8)
LAYOUTS = {"tp": abi.EXPERT_LAYOUT_TP, "ep": abi.EXPERT_LAYOUT_EP}
SHARDING = {
    "gathered": {"sequence_parallel": abi.SEQUENCE_PARALLEL_OFF, "all_reduce": abi.ALL_REDUCE_NCCL},
    "peers": {"sequence_parallel": abi.SEQUENCE_PARALLEL_OFF, "all_reduce": abi.ALL_REDUCE_CUSTOM},
    "sharded": {"sequence_parallel": abi.SEQUENCE_PARALLEL_ON, "all_reduce": abi.ALL_REDUCE_NCCL},
    "auto": {},
}
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "vocab_size": 512,
}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.2}
GAP_FACTOR = 2.0
GAP_FLOOR = 2e-3
FAULT_SECONDS = 120
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_weights = pytest.mark.parametrize("weights", ["fp8_channel", "bf16"])
every_count = pytest.mark.parametrize("num_ranks", RANK_COUNTS)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes a random checkpoint with 160 experts of a kind of weights, once."""
    root = tmp_path_factory.mktemp("ranks")

    @cache
    def find(weights: Weights) -> Checkpoint:
        return open_checkpoint(make_checkpoint(root / weights, "glm47", weights, **SHAPE))

    return find


def open_ranks(checkpoint: Checkpoint, num_ranks: int, layout: str, **changes: int) -> NativeEngine:
    """An engine of so many ranks, all on this GPU."""
    shared = {"num_ranks": num_ranks, "row_slices": num_ranks, "shares_devices": 1, "expert_layout": LAYOUTS[layout]}
    if num_ranks == 1:
        shared["shares_devices"] = 0
    fixed = {"kernels": abi.KERNELS_PORTABLE, "max_step_tokens": 2048}
    return open_cuda(checkpoint, **(fixed | shared | changes))


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Random tokens."""
    source = random.Random(seed)
    return tuple(source.randrange(SHAPE["vocab_size"]) for _ in range(length))


def mixed_asks(count: int) -> list[Ask]:
    """Requests of many lengths, every second one sampled."""
    source = random.Random(count)
    return [
        make_ask(
            prompt(source.randrange(2**32), source.randint(1, 90)),
            source.randint(1, 12),
            **(SEEDED | {"seed": index} if index % 2 else {}),
        )
        for index in range(count)
    ]


def bytes_of_step(engine: NativeEngine, num_rows: int) -> int:
    """What ranks send in a step of so many requests of one token."""
    session = Session(engine)
    ids = [session.add(make_ask((index,), 1)) for index in range(num_rows)]
    before = engine.stats().collective_bytes
    session.step([(request_id, 1) for request_id in ids])
    for request_id in ids:
        session.free(request_id)
    return int(engine.stats().collective_bytes - before)


@every_count
@every_layout
@every_weights
def test_every_sharding_gives_the_same_bits(checkpoints: Any, weights: Weights, layout: str, num_ranks: int) -> None:
    """More than 16 requests decode at once: between more than two ranks peer memory then sums in two steps.

    Two steps read so much less that 24 rows take fewer bytes than 16, which are summed in one.
    """
    wanted = mixed_asks(24)
    assert sum(ask.max_new_tokens > 1 for ask in wanted) > 16
    expected = None
    for name, sharing in SHARDING.items():
        with open_ranks(checkpoints(weights), num_ranks, layout, **sharing) as engine:
            alone = [answer_all(engine, [ask])[0] for ask in wanted[:3]]
            whole = answer_all(engine, wanted)
            chunked = answer_all(engine, wanted, chunk=7)
            stats = engine.stats()
            sums_in_two_steps = bytes_of_step(engine, 24) < bytes_of_step(engine, 16)
        assert sums_in_two_steps == (num_ranks > 2 and name in ("peers", "auto")), name
        assert stats.steps_replayed > 0 and stats.collectives_run > 0 and stats.collective_bytes > 0
        expected = whole if expected is None else expected
        assert whole == expected, name
        assert chunked == expected, name
        assert alone == expected[:3], name


@every_count
def test_random_schedules_change_nothing(checkpoints: Any, num_ranks: int) -> None:
    wanted = mixed_asks(12)
    with open_ranks(checkpoints("fp8_channel"), num_ranks, "tp") as engine:
        expected = {ask: answer_all(engine, [ask])[0] for ask in wanted}
        session = Session(engine)
        owners = run_at_random(session, list(wanted), random.Random(3))
        assert {session.answers[key] == expected[ask] for key, ask in owners.items()} == {True}


@every_count
def test_cached_prefixes_change_nothing(checkpoints: Any, num_ranks: int) -> None:
    ask = make_ask(prompt(9, 2 * PAGE_TOKENS + 5), 6)
    with open_ranks(checkpoints("fp8_channel"), num_ranks, "ep") as engine:
        (cold,) = answer_all(engine, [ask])
        (cached,) = answer_all(engine, [ask])
    assert cached == cold and cached.cached_tokens == 2 * PAGE_TOKENS


def prompt_logprobs(engine: NativeEngine) -> np.ndarray[Any, Any]:
    """The log-probability of every token of a long prompt behind those before it."""
    tokens = prompt(21, 600)
    (answer,) = answer_all(engine, [make_ask(tokens, 1, has_prompt_logprobs=1)], chunk=200)
    return np.array([answer.logprobs[position][0][1] for position in range(1, len(tokens))])


def gap_to_cpu(checkpoint: Checkpoint, num_ranks: int, layout: str) -> float:
    """Mean difference of log-probabilities between the GPU's ranks and as many ranks of the exact CPU path."""
    with open_ranks(checkpoint, num_ranks, layout) as engine:
        got = prompt_logprobs(engine)
    options = {"num_ranks": num_ranks, "row_slices": num_ranks, "expert_layout": LAYOUTS[layout]}
    with open_exact(checkpoint, **options) as engine:
        expected = prompt_logprobs(engine)
    return float(np.abs(got - expected).mean())


@every_layout
@every_weights
def test_ranks_are_as_near_the_cpu_as_one_rank(
    checkpoints: Any, weights: Weights, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gaps = {num_ranks: gap_to_cpu(checkpoints(weights), num_ranks, layout) for num_ranks in (1, *RANK_COUNTS)}
    with capsys.disabled():
        print(f"\n{weights} {layout}: mean gap of log-probabilities " + str(gaps), end=" ")
    assert all(gap <= GAP_FACTOR * gaps[1] + GAP_FLOOR for gap in gaps.values())


FAULT_PROGRAM = """
import sys
from glint.checkpoint.table import open_checkpoint
from glint.native import abi
from pathlib import Path
from tests.cpu.small_engine import answer_all, make_ask
from tests.gpu.test_ranks import open_ranks, prompt
engine = open_ranks(open_checkpoint(Path(sys.argv[1])), 4, "tp")
answer_all(engine, [make_ask(prompt(1, 40), 12)])
print("answered")
"""


@pytest.mark.parametrize("fault", ["load:2:1", "step:1:3", "collective:3:5", "collective:3:40", "none"])
def test_a_fault_of_a_rank_ends_with_its_name(checkpoints: Any, fault: str) -> None:
    """The fifth collective is one of the prompt's step, the fortieth one of a step that replays a captured graph."""
    folder = checkpoints("fp8_channel").files[0].path
    ended = subprocess.run(
        [sys.executable, "-c", FAULT_PROGRAM, str(Path(os.fsdecode(folder)).parent)],
        env=os.environ | ({} if fault == "none" else {"GLINT_FAULT": fault}),
        capture_output=True,
        text=True,
        timeout=FAULT_SECONDS,
        check=False,
    )
    if fault == "none":
        assert ended.stdout.strip() == "answered", ended.stderr
        return
    rank = fault.split(":")[1]
    assert ended.returncode != 0
    assert f"rank {rank} of 4 failed" in ended.stderr, ended.stderr
