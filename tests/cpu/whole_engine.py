"""Whole engines on the small random model, and what the native engine answers to a request alone."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glint import SamplingParams
from glint.checkpoint.table import Checkpoint
from glint.engine.args import EngineArgs
from glint.engine.engine import Engine
from glint.engine.request import StepOutput
from glint.engine.settings import EngineSettings
from glint.text.tokenizer import Tokenizer
from tests.cpu.small_engine import VOCAB_SIZE, Ask, answer_alone, small_model


def make_engine(
    tokenizer: Tokenizer | None = None,
    say: Callable[[str], None] | None = None,
    checkpoint: Checkpoint | None = None,
    **options: Any,
) -> Engine:
    """An engine on the small model, or on the given one; the context is short enough for few pages.

    It makes drafts only where the options say how many.
    """
    args = EngineArgs(**({"page_tokens": 8, "num_pages": 128, "threads": 1, "max_model_len": 64} | options))
    checkpoint = checkpoint or small_model()
    has_mtp = bool(checkpoint.mtp_tensors) and "num_speculative_tokens" in options
    settings = EngineSettings.resolve(Path("small"), checkpoint.config, args, has_mtp)
    return Engine(checkpoint, settings, tokenizer, say=say)


def prompt_of(seed: int, length: int) -> list[int]:
    """Random tokens."""
    source = random.Random(seed)
    return [source.randrange(VOCAB_SIZE) for _ in range(length)]


def greedy(count: int, **options: Any) -> SamplingParams:
    """Up to `count` greedy tokens, with the given parameters."""
    return SamplingParams(**({"temperature": 0.0, "max_tokens": count, "ignore_eos": True} | options))


def gather(engine: Engine, outputs: dict[int, list[StepOutput]]) -> dict[int, list[StepOutput]]:
    """Run to the end, adding to the outputs of each request; nothing may come after a request's last output."""
    while engine.has_work:
        for output in engine.step():
            before = outputs.setdefault(output.request_id, [])
            assert not before or before[-1].finish_reason is None
            before.append(output)
    return outputs


def run(engine: Engine, *ids: int) -> list[list[int]]:
    """The tokens of the requests, run to their end."""
    outputs = gather(engine, {})
    return [[token for output in outputs[request_id] for token in output.token_ids] for request_id in ids]


def alone(prompt: list[int], count: int, stop_tokens: tuple[int, ...] = ()) -> list[int]:
    """What the native engine answers to one greedy request that has it for itself, one step after the other."""
    return answer_alone(Ask(tuple(prompt), count, stop_tokens=stop_tokens)).tokens


def assert_idle(engine: Engine) -> None:
    """Nothing is left of any request."""
    stats = engine.stats()
    assert (stats.steps_in_flight, stats.num_requests, stats.pages_held) == (0, 0, 0)
    assert (engine.num_running, engine.num_waiting, engine.has_work) == (0, 0, False)
    engine.check()
