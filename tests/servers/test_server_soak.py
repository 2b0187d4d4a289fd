"""Long runs against real servers: no token is lost or doubled, and pages and memory return to where they were.

The runs are short unless GLINT_SOAK_SECONDS says otherwise; `scripts/test.sh --all` runs two minutes.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.generate_client import Stream, make_client
from tests.e2e.raw_http import wait_for
from tests.e2e.served import Served, served
from tests.e2e.small_glm import write_small_glm

SECONDS = float(os.environ.get("GLINT_SOAK_SECONDS", "15"))
IS_LONG = SECONDS >= 60
NUM_STREAMS = 64
NUM_COMPARED = 8
NUM_STEPS = 10_000 if IS_LONG else 2_000
IDLE_SECONDS = 60.0
ALLOWED_GROWTH_BYTES = 8 * 2**20
LENGTHS = (4, 12, 40, 96) if IS_LONG else (4, 8, 12)


def assert_pages_free(server: Served) -> None:
    """No request holds a page, and none is missing; the last abort may still be under way."""
    wait_for(lambda: pages_of(server)["held"] == 0, "no page is held", IDLE_SECONDS)
    stats: dict[str, Any] = server.wait_idle()
    assert pages_of(server)["free"] + pages_of(server)["cached"] == int(stats["cache_config"]["num_pages"])


def pages_of(server: Served) -> dict[str, int]:
    """The server's pages by their state."""
    stats: dict[str, Any] = server.stats()
    return dict(stats["pages"])


def make_stream(source: random.Random, vocab_size: int) -> Stream:
    """A request with lengths, stops and sampling of its own; one in eight is given up by its client."""
    body: dict[str, Any] = {
        "prompt": [source.randrange(3, vocab_size) for _ in range(source.choice((1, 3, 7)))],
        "max_tokens": source.choice(LENGTHS),
        "temperature": source.choice((0.0, 0.7, 1.0)),
        "seed": source.randrange(2**63),
        "ignore_eos": source.random() < 0.7,
    }
    if source.random() < 0.3:
        body["stop"] = source.choice(([" the"], ["e"], ["\n", ". "]))
    return Stream(body, source.randint(1, 6) if source.random() < 0.125 else None)


class Load:
    """Keeps streams going until a time is over; what is then under way is cancelled."""

    def __init__(self, server: Served, num_streams: int, vocab_size: int) -> None:
        self.done: list[Stream] = []
        self._server = server
        self._num_streams = num_streams
        self._vocab_size = vocab_size

    async def run(self, seconds: float) -> None:
        """Load the server for so long."""
        async with make_client(self._server.url) as client:
            workers = [asyncio.create_task(self._work(client, number)) for number in range(self._num_streams)]
            done, _ = await asyncio.wait(workers, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            for worker in done:
                worker.result()

    async def _work(self, client: Any, number: int) -> None:
        source = random.Random(number)
        while True:
            self.done.append(await make_stream(source, self._vocab_size).run(client))


def choose(streams: list[Stream], count: int) -> list[Stream]:
    """Some of the streams that were read to their end, of every way of ending."""
    whole = [stream for stream in streams if not stream.is_cancelled]
    source = random.Random(0)
    source.shuffle(whole)
    by_end = [next((stream for stream in whole if stream.finish_reason == end), None) for end in ("stop", "length")]
    chosen = [stream for stream in by_end if stream is not None]
    return chosen + [stream for stream in whole if stream not in chosen][: count - len(chosen)]


async def run_alone(server: Served, stream: Stream) -> Stream:
    """The same request again, with no other beside it."""
    async with make_client(server.url) as client:
        return await Stream(stream.body).run(client)


def test_64_streams_lose_no_token_and_leave_nothing(tmp_path: Path) -> None:
    """Sampled streams equal the same requests run alone, pages are free, and memory is flat after a third."""
    with served(tmp_path / "server.log", "--max-num-seqs", "64", "--max-total-tokens", "6144") as server:
        warm_up = Load(server, NUM_STREAMS, 49152)
        asyncio.run(warm_up.run(SECONDS / 3))
        assert_pages_free(server)
        before = server.memory_bytes()
        load = Load(server, NUM_STREAMS, 49152)
        asyncio.run(load.run(SECONDS * 2 / 3))
        assert_pages_free(server)
        growth = server.memory_bytes() - before
        streams = warm_up.done + load.done
        assert any(stream.is_cancelled for stream in streams)
        compared = choose(streams, NUM_COMPARED)
        assert len(compared) == NUM_COMPARED
        for stream in compared:
            alone = asyncio.run(run_alone(server, stream))
            assert (stream.token_ids, stream.text) == (alone.token_ids, alone.text), stream.body
            assert stream.finish_reason == alone.finish_reason
        assert_pages_free(server)
        outcomes = {line["outcome"] for line in server.outcome_lines()}
        assert outcomes <= {"finished", "stopped", "length", "cancelled"}
        print(f"{len(streams)} streams, memory grew by {growth / 2**20:.1f} MiB")
        assert growth < ALLOWED_GROWTH_BYTES


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a small GLM model with few pages, all of which are soon in use."""
    folder = tmp_path_factory.mktemp("soak")
    model = write_small_glm(folder / "model")
    with served(folder / "server.log", "--model", str(model), "--max-total-tokens", "2048") as running:
        yield running


def test_thousands_of_steps_leak_nothing(small_server: Served) -> None:
    """After a fifth of the steps as warm-up, the rest leaves memory within 8 MiB and every page free."""
    load = Load(small_server, 6, 330)
    run_steps(small_server, load, NUM_STEPS // 5)
    assert_pages_free(small_server)
    before, done_before = small_server.memory_bytes(), len(load.done)
    run_steps(small_server, load, NUM_STEPS * 4 // 5)
    assert_pages_free(small_server)
    growth = small_server.memory_bytes() - before
    print(f"{len(load.done) - done_before} requests, memory grew by {growth / 2**20:.1f} MiB")
    assert growth < ALLOWED_GROWTH_BYTES
    assert len(small_server.outcome_lines()) >= len(load.done)


def run_steps(server: Served, load: Load, count: int) -> None:
    """Load the server until it has made so many more steps."""
    first: Any = server.stats()["steps"]
    deadline = time.monotonic() + 600
    while int(str(server.stats()["steps"])) < first + count:
        assert time.monotonic() < deadline, f"{count} steps take more than 600 s"
        asyncio.run(load.run(2.0))
