"""Long prompts of one key in flight: short requests of the same and of another key end before nearly all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.served import Served, served

LONG_KEY, SHORT_KEY = "long=key", "short-key"
NUM_LONG = 40
LONG_TOKENS = 400


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two keys of different weights."""
    folder = tmp_path_factory.mktemp("shared")
    file = folder / "keys"
    file.write_text(f"{LONG_KEY}\n{SHORT_KEY} weight=2\n")
    file.chmod(0o600)
    with served(folder / "server.log", "--api-key-file", str(file), "--max-num-batched-tokens", "128") as running:
        yield running


def body_of(token: int, num_tokens: int, **fields: Any) -> dict[str, Any]:
    prompt = [token] * num_tokens
    return {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0, "logprobs": 3} | fields


async def ask(client: httpx.AsyncClient, key: str, body: dict[str, Any]) -> Any:
    answer = await client.post("/generate", json=body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


async def overtake(server: Served) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        shorts = [(SHORT_KEY, body_of(90, 31)), (LONG_KEY, body_of(91, 31)), (LONG_KEY, body_of(92, 31, priority=-9))]
        alone = [await ask(client, key, body) for key, body in shorts]
        first = asyncio.create_task(ask(client, LONG_KEY, body_of(100, LONG_TOKENS)))
        rest = [ask(client, LONG_KEY, body_of(101 + index, LONG_TOKENS)) for index in range(NUM_LONG - 1)]
        long = [first, *map(asyncio.create_task, rest)]
        await asyncio.wait([first])
        before = sum(task.done() for task in long)
        found = await asyncio.gather(*(ask(client, key, body) for key, body in shorts))
        assert sum(task.done() for task in long) - before <= 3
        assert sum(not task.done() for task in long) >= NUM_LONG - 8
        assert found == alone
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)


def test_short_requests_end_while_nearly_all_long_ones_wait(shared: Served) -> None:
    asyncio.run(overtake(shared))
