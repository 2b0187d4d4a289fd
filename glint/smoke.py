"""The smoke check: five prompts through the whole engine, with all that can be checked."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glint.engine.request import StepOutput
from glint.errors import RequestError
from glint.llm import LLM
from glint.sample.model import RECORD_NAME
from glint.sampling import SamplingParams

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea, there lived",
    "The three primary colours are",
    "To make a good cup of tea, you first",
)
MAX_TOKENS = 48
FEWEST_DISTINCT_TOKENS = 4
LOWEST_MEAN_LOGPROB = -3.0
SAMPLE_ANSWERS = {"The capital of France is": "Paris"}


@dataclass(frozen=True)
class Run:
    """One prompt that ran alone: what came out and how long it took."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    prefill_seconds: float
    decode_seconds: float


def run(
    model_dir: Path,
    engine: Path | None = None,
    **options: Any,
) -> int:
    """Runs the prompts alone, again from the prefix cache, and together; gives 0 if all is well, else 1.

    Prints text, tokens and speed of every prompt, and names each thing that is off. The arguments are those of `LLM`.
    """
    started = time.monotonic()
    with LLM(model_dir, engine=engine, progress=True, **options) as llm:
        seconds = time.monotonic() - started
        settings = llm.settings
        ranks = f", {settings.tp} ranks with row_slices {settings.row_slices}" if settings.tp > 1 else ""
        computing = f"device {settings.device}{ranks}, {settings.threads} threads, kernels {llm.engine.kernels}"
        print(f"model {model_dir}, loaded in {seconds:.2f} s, {computing}")
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0)
        runs = [run_alone(llm, prompt, params) for prompt in PROMPTS]
        answers = SAMPLE_ANSWERS if (model_dir / RECORD_NAME).is_file() else {}
        problems = [problem for one in runs for problem in content_problems(one, answers.get(one.prompt))]
        problems += repeat_problems(llm, runs, params)
        problems += page_problems(llm)
    print_speed(runs)
    for problem in problems:
        print(f"OFF: {problem}")
    print(f"smoke: {len(problems)} problems" if problems else "smoke: all is well")
    return 1 if problems else 0


def run_alone(llm: LLM, prompt: str, params: SamplingParams) -> Run:
    """Streams one prompt, prints it with its text, and measures prefill and decode."""
    prompt_token_ids = encode(llm, prompt)
    print(f"\n> {prompt}", end="", flush=True)
    started = time.monotonic()
    arrivals: list[float] = []
    outputs: list[StepOutput] = []
    for output in llm.stream(prompt_token_ids, params):
        arrivals.append(time.monotonic())
        outputs.append(output)
        print(output.text, end="", flush=True)
    one = Run(
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        text="".join(output.text or "" for output in outputs),
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=tuple(value for output in outputs for value in chosen_logprobs(output)),
        finish_reason=outputs[-1].finish_reason,
        prefill_seconds=arrivals[0] - started,
        decode_seconds=arrivals[-1] - arrivals[0],
    )
    print(f"\n  [{len(one.token_ids)} tokens, {one.finish_reason}: {describe_speed([one])}]")
    return one


def chosen_logprobs(output: StepOutput) -> list[float]:
    """The log-probabilities of the tokens that one step brought."""
    return [entry[token] for token, entry in zip(output.token_ids, output.logprobs or (), strict=True)]


def encode(llm: LLM, prompt: str) -> tuple[int, ...]:
    """The tokens of a prompt."""
    if llm.tokenizer is None:
        raise RequestError("the smoke check reads text; load the model with its tokenizer")
    return tuple(llm.tokenizer.encode(prompt, add_special_tokens=True))


def describe_speed(runs: Sequence[Run]) -> str:
    """Prefill and decode speed over some runs, in tokens per second."""
    prefill = sum(len(one.prompt_token_ids) for one in runs) / sum(one.prefill_seconds for one in runs)
    decoded = sum(len(one.token_ids) - 1 for one in runs)
    seconds = sum(one.decode_seconds for one in runs)
    decode = f"{decoded / seconds:,.1f} tok/s" if seconds > 0 else "not measured"
    return f"prefill {prefill:,.1f} tok/s, decode {decode}"


def print_speed(runs: Sequence[Run]) -> None:
    """Prints the speed over all runs."""
    tokens = sum(len(one.token_ids) for one in runs)
    print(f"\n{len(runs)} prompts, {tokens} tokens, one request at a time: {describe_speed(runs)}")


def content_problems(one: Run, answer: str | None = None) -> list[str]:
    """The problems of the text of one prompt, which must hold `answer` where there is one."""
    where = f"prompt {one.prompt!r}"
    problems = []
    if one.finish_reason not in ("stop", "length"):
        problems.append(f"{where} ended with {one.finish_reason!r}; 'stop' or 'length' was expected")
    if one.finish_reason == "length" and len(one.token_ids) != MAX_TOKENS:
        problems.append(f"{where} ended by length after {len(one.token_ids)} tokens; {MAX_TOKENS} were asked for")
    if not one.text.strip():
        problems.append(f"{where} gave no text")
    if "\N{REPLACEMENT CHARACTER}" in one.text:
        problems.append(f"{where} gave bytes that are not UTF-8: {one.text!r}")
    distinct = len(set(one.token_ids))
    if len(one.token_ids) == MAX_TOKENS and distinct < FEWEST_DISTINCT_TOKENS:
        problems.append(f"{where} gave only {distinct} different tokens: {one.text!r}")
    mean = statistics.fmean(one.logprobs) if one.logprobs else math.nan
    if not mean >= LOWEST_MEAN_LOGPROB:
        problems.append(
            f"{where} gave tokens of mean log-probability {mean:.2f}, {LOWEST_MEAN_LOGPROB} or more was expected: "
            f"the model guesses {one.text!r}"
        )
    if answer is not None and answer not in one.text:
        problems.append(f"{where} gave {one.text!r}; the sample model answers {answer!r}")
    return problems


def repeat_problems(llm: LLM, runs: Sequence[Run], params: SamplingParams) -> list[str]:
    """The differences when the prompts run together, and when half of each answer is resent and found in the cache."""
    problems = []
    batch = llm.generate(prompt_token_ids=[one.prompt_token_ids for one in runs], sampling_params=params)
    for one, together in zip(runs, batch, strict=True):
        where = f"prompt {one.prompt!r}"
        if tuple(together.token_ids) != one.token_ids:
            problems.append(f"{where} gave other tokens in a batch: {together.text!r} instead of {one.text!r}")
        half = len(one.token_ids) // 2
        known = [*one.prompt_token_ids, *one.token_ids[:half]]
        rest = replace(params, max_tokens=MAX_TOKENS - half)
        again = llm.generate(prompt_token_ids=[known], sampling_params=rest)[0]
        if again.cached_tokens == 0 and len(known) > llm.settings.page_tokens:
            problems.append(f"{where} with half its answer, {len(known)} tokens, was not found in the prefix cache")
        if tuple(again.token_ids) != one.token_ids[half:]:
            problems.append(
                f"{where} went on differently from the prefix cache: {again.text!r} instead of {one.text!r}"
            )
    return problems


def page_problems(llm: LLM) -> list[str]:
    """The problems of the engine's bookkeeping once every request has ended."""
    stats = llm.engine.stats()
    llm.engine.check()
    problems = []
    if stats.num_requests != 0:
        problems.append(f"{stats.num_requests} requests are still held after all ended")
    if stats.pages_free + stats.pages_cached != stats.num_pages:
        problems.append(
            f"{stats.pages_held} pages were not returned: {stats.pages_free} free + {stats.pages_cached} cached "
            f"of {stats.num_pages}"
        )
    return problems
