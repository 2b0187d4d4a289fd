"""Decoding with drafts of the MTP layer beside decoding without, on English text."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from glint.bench.prompts import read_sentences
from glint.checkpoint.table import Checkpoint
from glint.engine.args import EngineArgs
from glint.engine.engine import Engine
from glint.engine.settings import EngineSettings
from glint.errors import EngineError
from glint.sampling import SamplingParams
from glint.text.tokenizer import Tokenizer

PROMPT_SENTENCES = 3
MAX_PROMPT_TOKENS = 128


@dataclass(frozen=True)
class SpeculationRow:
    """Tokens per second of some requests at once without drafts and with them, and the drafts that were right."""

    batch: int
    plain_tokens_per_second: float
    tokens_per_second: float
    draft_tokens: int
    accepted_tokens: int


def measure_speculation(
    checkpoint: Checkpoint,
    folder: Path,
    args: EngineArgs,
    library_path: Path | None,
    batches: Sequence[int],
    decode_tokens: int,
) -> tuple[SpeculationRow, ...]:
    """Time the same greedy answers on an engine without drafts and on one with them; they must be the same.

    Every batch runs twice on each engine and the second run counts, so that what the engine learns about its drafts is
    learned.
    """
    tokenizer = Tokenizer(folder)
    found: list[list[tuple[float, int, int]]] = []
    answers = []
    for count in (0, args.num_speculative_tokens):
        sized = replace(
            args, num_speculative_tokens=count, num_pages=None, max_model_len=MAX_PROMPT_TOKENS + decode_tokens
        )
        settings = EngineSettings.resolve(folder, checkpoint.config, sized, has_mtp=True)
        with Engine(checkpoint, settings, None, library_path) as engine:
            runs = [_time_answers(engine, tokenizer, batch, decode_tokens) for batch in batches for _ in range(2)]
        found.append([figures for figures, _ in runs[1::2]])
        answers.append([tokens for _, tokens in runs])
    if answers[0] != answers[1]:
        raise EngineError("the answers with drafts are not those without; report this with the output of glint check")
    return tuple(
        SpeculationRow(batch, plain[0], *drafted) for batch, plain, drafted in zip(batches, *found, strict=True)
    )


def _time_answers(
    engine: Engine, tokenizer: Tokenizer, batch: int, decode_tokens: int
) -> tuple[tuple[float, int, int], dict[int, list[int]]]:
    """Tokens per second, drafts and right drafts of some answers, and the answers by the place of their request."""
    sentences = read_sentences()
    params = SamplingParams(temperature=0.0, max_tokens=decode_tokens, ignore_eos=True)
    places = {}
    for place in range(batch):
        text = " ".join(sentences[place * PROMPT_SENTENCES :][:PROMPT_SENTENCES])
        (request_id,) = engine.submit(tokenizer.encode(text)[:MAX_PROMPT_TOKENS], params)
        places[request_id] = place
    answers: dict[int, list[int]] = {place: [] for place in range(batch)}
    drafts = accepted = 0
    began_at = time.perf_counter()
    while engine.has_work:
        for output in engine.step():
            answers[places[output.request_id]] += output.token_ids
        drafts += engine.last_step.draft_tokens
        accepted += engine.last_step.accepted_tokens
    seconds = time.perf_counter() - began_at
    return (batch * decode_tokens / seconds, drafts, accepted), answers


def render_speculation(rows: Sequence[SpeculationRow], drafts: int | str) -> str:
    """The table that a person reads."""
    lines = [f"speculation, {drafts} drafts; prompts of English text, their time included"]
    lines.append(f"{'':22}{'off tok/s':>10}{'on tok/s':>10}{'ratio':>8}{'drafts':>9}{'right':>7}")
    for row in rows:
        ratio = row.tokens_per_second / row.plain_tokens_per_second
        right = f"{row.accepted_tokens / row.draft_tokens:.0%}" if row.draft_tokens else "-"
        speeds = f"{row.plain_tokens_per_second:>10.1f}{row.tokens_per_second:>10.1f}{ratio:>7.2f}x"
        lines.append(f"{f'decode, {row.batch} at once':22}{speeds}{row.draft_tokens:>9}{right:>7}")
    return "\n".join(lines)
