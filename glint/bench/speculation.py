"""Decoding with drafts of the MTP layer beside decoding without, on answers to questions."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median

from glint.bench.prompts import read_questions
from glint.checkpoint.table import Checkpoint
from glint.engine.args import EngineArgs
from glint.engine.engine import Engine
from glint.engine.settings import EngineSettings
from glint.errors import EngineError
from glint.sampling import SamplingParams
from glint.terminal import say
from glint.text.chat import render_prompt
from glint.text.tokenizer import Tokenizer

MAX_PROMPT_TOKENS = 256
TURNS = 3
FEWEST_ANSWERS = 4
MAX_TURN_TOKENS = 2048


@dataclass(frozen=True)
class SpeculationRow:
    """Tokens per second of some requests at once without drafts and with them, and the drafts that were right.

    The speeds are medians over the turns, the ratio is the median of the ratios of the turns, the drafts are sums.
    """

    batch: int
    plain_tokens_per_second: float
    tokens_per_second: float
    ratio: float
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True)
class _Run:
    """The answers of some requests at once, by their places, with their speed and drafts."""

    tokens_per_second: float
    draft_tokens: int
    accepted_tokens: int
    answers: dict[int, list[int]]


def measure_speculation(
    checkpoint: Checkpoint,
    folder: Path,
    args: EngineArgs,
    library_path: Path | None,
    batches: Sequence[int],
    answer_tokens: int,
) -> tuple[SpeculationRow, ...]:
    """Time the same greedy answers on an engine without drafts and on one with them; they must be the same.

    The engines take turns, so that a machine which is slower at one time than at another is so for both. Every turn
    has prompts of its own. Before them the engine with drafts has one alone, in which it learns what its drafts cost.
    An answer has at most `answer_tokens`, or fewer where all of a turn together would have more than 2,048.
    """
    tokenizer = Tokenizer(folder)
    engines = []
    with ExitStack() as stack:
        for count in (0, args.num_speculative_tokens):
            sized = replace(
                args, num_speculative_tokens=count, num_pages=None, max_model_len=MAX_PROMPT_TOKENS + answer_tokens
            )
            settings = EngineSettings.resolve(folder, checkpoint.config, sized, has_mtp=True)
            engines.append(stack.enter_context(Engine(checkpoint, settings, None, library_path)))
        return tuple(
            _measure_batch(engines, tokenizer, batch, min(answer_tokens, MAX_TURN_TOKENS // batch)) for batch in batches
        )


def _measure_batch(engines: Sequence[Engine], tokenizer: Tokenizer, batch: int, answer_tokens: int) -> SpeculationRow:
    """Let the engine without drafts and the one with them answer in turns."""
    _time_answers(engines[1], tokenizer, batch, 0, answer_tokens)
    turns = []
    for turn in range(1, 1 + TURNS):
        say(f"speculation, {batch} at once: turn {turn} of {TURNS}")
        plain, drafted = (
            _time_answers(engine, tokenizer, batch, turn * max(batch, FEWEST_ANSWERS), answer_tokens)
            for engine in engines
        )
        if plain.answers != drafted.answers:
            raise EngineError(
                "the answers with drafts are not those without; report this with the output of glint check"
            )
        turns.append((plain, drafted))
    return SpeculationRow(
        batch=batch,
        plain_tokens_per_second=median(plain.tokens_per_second for plain, _ in turns),
        tokens_per_second=median(drafted.tokens_per_second for _, drafted in turns),
        ratio=median(drafted.tokens_per_second / plain.tokens_per_second for plain, drafted in turns),
        draft_tokens=sum(drafted.draft_tokens for _, drafted in turns),
        accepted_tokens=sum(drafted.accepted_tokens for _, drafted in turns),
    )


def _time_answers(engine: Engine, tokenizer: Tokenizer, batch: int, first_question: int, answer_tokens: int) -> _Run:
    """Answer questions, `batch` at once and at least four, each to the answer's own end or `answer_tokens`."""
    params = SamplingParams(temperature=0.0, max_tokens=answer_tokens)
    prompts = _encode_questions(tokenizer, first_question, max(batch, FEWEST_ANSWERS))
    answers: dict[int, list[int]] = {place: [] for place in range(len(prompts))}
    places: dict[int, int] = {}
    waiting = iter(range(len(prompts)))

    def submit_next() -> None:
        for place in islice(waiting, 1):
            (request_id,) = engine.submit(prompts[place], params)
            places[request_id] = place

    drafts = accepted = 0
    began_at = time.perf_counter()
    for _ in range(batch):
        submit_next()
    while engine.has_work:
        for output in engine.step():
            answers[places[output.request_id]] += output.token_ids
            if output.finish_reason is not None:
                submit_next()
        drafts += engine.last_step.draft_tokens
        accepted += engine.last_step.accepted_tokens
    seconds = time.perf_counter() - began_at
    return _Run(sum(map(len, answers.values())) / seconds, drafts, accepted, answers)


def _encode_questions(tokenizer: Tokenizer, first: int, count: int) -> list[list[int]]:
    """Questions as the chat template asks them; plainly, for a model without a template."""
    questions = read_questions()
    found = []
    for place in range(count):
        question = questions[(first + place) % len(questions)]
        if tokenizer.has_chat_template:
            prompt = render_prompt(tokenizer, [{"role": "user", "content": question}])
            found.append(tokenizer.encode_prompt(prompt)[:MAX_PROMPT_TOKENS])
        else:
            found.append(tokenizer.encode(question)[:MAX_PROMPT_TOKENS])
    return found


def render_speculation(rows: Sequence[SpeculationRow], drafts: int | str) -> str:
    """The table that a person reads."""
    lines = [f"speculation, {drafts} drafts; greedy answers to questions, prompts included; medians of {TURNS} turns"]
    lines.append(f"{'':22}{'off tok/s':>10}{'on tok/s':>10}{'ratio':>8}{'drafts':>9}{'right':>7}")
    for row in rows:
        right = f"{row.accepted_tokens / row.draft_tokens:.0%}" if row.draft_tokens else "-"
        speeds = f"{row.plain_tokens_per_second:>10.1f}{row.tokens_per_second:>10.1f}{row.ratio:>7.2f}x"
        lines.append(f"{f'decode, {row.batch} at once':22}{speeds}{row.draft_tokens:>9}{right:>7}")
    return "\n".join(lines)
