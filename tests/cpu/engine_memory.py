"""Measures the memory of engines in a process of its own.

    python -m tests.cpu.engine_memory requests ROUNDS SECONDS
    python -m tests.cpu.engine_memory drafts ROUNDS SECONDS
    python -m tests.cpu.engine_memory engines ROUNDS SECONDS

`requests` runs rounds of requests on one engine, `drafts` on a whole engine that speculates, `engines` rounds of
engines that are opened, used and freed: so many rounds, and further ones until the seconds are over. After each round
it prints the memory of the process that is of no file and in RAM. In a process that ran other tests before, what those
left free would be taken again unseen, or given back meanwhile; here nothing else happens. What is free is not measured:
Python's garbage is collected, Python takes its memory from malloc, malloc has one arena, and what that holds free goes
back to the system before each reading.
"""

import ctypes
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from glint.checkpoint.table import open_checkpoint
from glint.engine.engine import Engine
from glint.native.library import NativeEngine
from glint.sampling import SamplingParams
from tests.cpu.small_engine import SMALL_SHAPE, VOCAB_SIZE, Session, answer_all, make_ask, open_engine
from tests.cpu.whole_engine import assert_idle, make_engine
from tests.reference.checkpoints import make_checkpoint

ENVIRONMENT = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1"}
REQUESTS_PER_ROUND = 500
REQUESTS_AT_ONCE = 6
ENGINES_PER_ROUND = 10
TOKENS = 8


def resident_bytes() -> int:
    """Memory of this process that is in RAM, without mapped files and without what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def run_requests(engine: NativeEngine, source: random.Random) -> None:
    """Run requests of many lengths; some are freed in the middle, some lose their pages."""
    session = Session(engine)
    num_left = REQUESTS_PER_ROUND
    while num_left > 0 or session.answers:
        while num_left > 0 and len(session.answers) < REQUESTS_AT_ONCE:
            prompt = [source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 50))]
            session.add(make_ask(prompt, source.randint(1, 20), temperature=1.0, seed=source.randrange(2**32)))
            num_left -= 1
        if source.random() < 0.02:
            session.free(source.choice(session.running))
        if source.random() < 0.05 and session.running:
            engine.release_pages(source.choice(session.running))
        if session.running:
            session.step([(request_id, 16) for request_id in session.running])
        for request_id in session.answers.keys() - set(session.running):
            session.free(request_id)


def run_drafts(engine: Engine, source: random.Random) -> None:
    """Run requests that make drafts, some of them right; some are aborted in the middle."""
    num_left = REQUESTS_PER_ROUND
    running: set[int] = set()
    while num_left > 0 or engine.has_work:
        while num_left > 0 and len(running) < REQUESTS_AT_ONCE:
            prompt = [source.randrange(TOKENS) for _ in range(source.randint(1, 30))]
            params = SamplingParams(temperature=1.0, seed=num_left, max_tokens=source.randint(1, 20), ignore_eos=True)
            running |= {*engine.submit(prompt, params)}
            num_left -= 1
        if source.random() < 0.02 and running:
            engine.abort(running.pop())
        running -= {output.request_id for output in engine.step() if output.finish_reason is not None}


def soak_drafts(num_rounds: int, seconds: float) -> None:
    """Run rounds of requests that make drafts in few pages."""
    source = random.Random(1)
    with TemporaryDirectory() as folder:
        shape = SMALL_SHAPE | {"vocab_size": TOKENS}
        checkpoint = open_checkpoint(make_checkpoint(Path(folder), "glm47", "fp8_channel", mtp="with copies", **shape))
        with make_engine(checkpoint=checkpoint, num_speculative_tokens="auto", num_pages=24) as engine:
            report_rounds(lambda: run_drafts(engine, source), num_rounds, seconds)
            assert_idle(engine)


def require_all_free(engine: NativeEngine) -> None:
    """No request is left, and every page is there."""
    stats = engine.stats()
    assert (stats.num_requests, stats.steps_in_flight, stats.pages_held) == (0, 0, 0)
    assert stats.pages_free + stats.pages_cached == stats.num_pages
    engine.check()


def use_engines() -> None:
    """Open, use and free engines."""
    for _ in range(ENGINES_PER_ROUND):
        with open_engine(max_step_tokens=512) as engine:
            answer_all(engine, [make_ask(range(100), 4)])


def report_rounds(run_round: Callable[[], None], num_rounds: int, seconds: float) -> None:
    """Print the memory after each round."""
    deadline = time.monotonic() + seconds
    num_done = 0
    while num_done < num_rounds or time.monotonic() < deadline:
        run_round()
        num_done += 1
        print(resident_bytes(), flush=True)


def main(part: str, num_rounds: int, seconds: float) -> None:
    """Run one of the parts."""
    assert ENVIRONMENT.items() <= os.environ.items(), f"to be started with {ENVIRONMENT}"
    if part == "engines":
        report_rounds(use_engines, num_rounds, seconds)
        return
    if part == "drafts":
        soak_drafts(num_rounds, seconds)
        return
    source = random.Random(1)
    control = make_ask(range(30), 12)
    with open_engine(num_pages=64, max_requests=8) as engine:
        expected = answer_all(engine, [control])
        report_rounds(lambda: run_requests(engine, source), num_rounds, seconds)
        require_all_free(engine)
        assert answer_all(engine, [control]) == expected


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
