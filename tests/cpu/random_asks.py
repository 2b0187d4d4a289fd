"""Random requests to the small checkpoints."""

import random
from typing import Any

from tests.cpu.small_engine import VOCAB_SIZE, Ask, make_ask

SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "top_p": 0.95,
    "top_k": 40,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
}


def random_prompt(seed: int, length: int) -> tuple[int, ...]:
    """Random tokens."""
    source = random.Random(seed)
    return tuple(source.randrange(VOCAB_SIZE) for _ in range(length))


def seeded(seed: int) -> dict[str, Any]:
    """Settings of a request that is sampled with a seed."""
    return SAMPLED | {"seed": seed}


def mixed_asks(count: int, seed: int = 0) -> list[Ask]:
    """Requests of many lengths, every second one sampled with a seed of its own."""
    source = random.Random(seed)
    return [
        make_ask(
            random_prompt(source.randrange(2**32), source.randint(1, 40)),
            source.randint(1, 10),
            **(seeded(index) if index % 2 else {}),
        )
        for index in range(count)
    ]
