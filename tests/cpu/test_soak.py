"""Long runs: memory stays bounded, pages come back, and a step allocates nothing."""

import random
import time
from pathlib import Path

import pytest

from glint.checkpoint.table import open_checkpoint
from glint.native import abi
from tests.cpu.c_programs import compile_program, run_program
from tests.cpu.small_engine import VOCAB_SIZE, Session, answer_all, answer_alone, make_ask, open_engine

SOAK_SECONDS = 20.0
SOAK_STEPS = 3000
WARM_UP_STEPS = 500
ALLOWED_GROWTH_BYTES = 8 * 2**20


def resident_bytes() -> int:
    """Memory of this process that is in RAM, without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def test_memory_is_bounded_and_pages_return() -> None:
    source = random.Random(1)
    control = make_ask(range(30), 12)
    deadline = time.monotonic() + SOAK_SECONDS
    with open_engine(num_pages=64, max_requests=8) as engine:
        session = Session(engine)
        resident_after_warm_up = None
        while (done := engine.stats().steps_done) < SOAK_STEPS or time.monotonic() < deadline:
            if resident_after_warm_up is None and done >= WARM_UP_STEPS:
                resident_after_warm_up = resident_bytes()
            while len(session.answers) < 6:
                prompt = [source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 50))]
                session.add(make_ask(prompt, source.randint(1, 20), temperature=1.0, seed=source.randrange(2**32)))
            if source.random() < 0.02:
                session.free(source.choice(session.running))
            if source.random() < 0.05 and session.running:
                engine.release_pages(source.choice(session.running))
            if session.running:
                session.step([(request_id, 16) for request_id in session.running])
            for request_id in session.answers.keys() - set(session.running):
                session.free(request_id)
        for request_id in list(session.answers):
            session.free(request_id)
        assert resident_after_warm_up is not None
        assert resident_bytes() - resident_after_warm_up < ALLOWED_GROWTH_BYTES
        stats = engine.stats()
        assert (stats.num_requests, stats.steps_in_flight, stats.pages_held) == (0, 0, 0)
        assert stats.pages_free + stats.pages_cached == stats.num_pages
        engine.check()
        assert answer_all(engine, [control]) == [answer_alone(control)]


def test_engines_give_their_memory_back() -> None:
    def use_engine() -> None:
        with open_engine(max_step_tokens=512) as engine:
            answer_all(engine, [make_ask(range(100), 4)])

    for _ in range(10):
        use_engine()
    before = resident_bytes()
    for _ in range(60):
        use_engine()
    assert resident_bytes() - before < ALLOWED_GROWTH_BYTES


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("kernels", [abi.KERNELS_EXACT, abi.KERNELS_PLAIN, abi.KERNELS_AUTO])
@pytest.mark.parametrize("scale_kind", [abi.SCALE_NONE, abi.SCALE_CHANNEL])
def test_steps_allocate_nothing(
    steady_steps: Path, scale_kind: int, kernels: int, num_threads: int, tmp_path: Path
) -> None:
    """The program's own malloc, realloc, aligned forms and mmap take the place of the C library's everywhere in it."""
    counts: dict[str, list[int]] = {}
    for part, count in run_program(steady_steps, tmp_path / "raw.bin", scale_kind, kernels, num_threads):
        counts.setdefault(part, []).append(int(count))
    assert min(counts.pop("init_engine")) > 0
    assert min(counts.pop("add_requests")) > 0
    assert counts == {part: [0, 0, 0] for part in ("prompt_steps", "decode_steps", "overlapped_steps", "resumed_steps")}


@pytest.fixture(scope="module")
def steady_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program("steady_steps", tmp_path_factory.mktemp("program"))


def test_weights_of_the_sample_model_are_mapped_not_copied(sample_model: Path) -> None:
    checkpoint = open_checkpoint(sample_model)
    with open_engine(checkpoint, num_pages=4, max_step_tokens=16, max_step_items=1) as engine:
        stats = engine.stats()
    assert stats.weight_bytes_mapped > 100 * 2**20
    assert 0 < stats.weight_bytes_copied < 0.15 * stats.weight_bytes_mapped
