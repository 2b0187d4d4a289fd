"""Record what the reference answers: python -m tests.reference.store NAMES, without names every file.

A name is that of a file in the recorded folder without its ending.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np

from glint.sample.model import make_sample_model
from glint.text.tokenizer import Tokenizer
from tests.cpu.rank_engine import GLM47_SHAPE
from tests.cpu.sampling_rows import SETTINGS_THAT_CUT
from tests.reference.checkpoints import make_checkpoint, make_prompts
from tests.reference.expected import (
    RECORDED,
    STATES_PROMPT,
    BestTokens,
    RecordedModel,
    Yardstick,
    digest_folder,
    make_sequences,
    recorded_name,
)
from tests.reference.kept_by_transformers import kept_by_transformers
from tests.reference.recorded_cases import (
    ANSWER_TOKENS,
    BREAK_CASES,
    DIVERGENCE_CASES,
    DIVERGENCE_TOKEN_LIMIT,
    KEPT_VOCAB_SIZE,
    MODEL_CASES,
    RANKS,
    ROUNDED_CACHE,
    ROUNDED_CACHE_CASES,
    ROUNDED_CACHE_TOKENS,
    SAMPLE,
    SAMPLE_PROMPTS,
    SAMPLE_TOKENS,
    Case,
)
from tests.reference.rounded_cache import rounded_cache_reference
from tests.reference.transformers_reference import Reference

NOTHING = np.empty(0, np.float32)


def greedy_answer(reference: Reference, prompt: list[int], count: int) -> BestTokens:
    """The best tokens along the reference's greedy answer."""
    tokens, _ = reference.greedy(prompt, count)
    best = BestTokens.of_rows(reference.logits(prompt + tokens)[len(prompt) - 1 : -1])
    if best.greedy != tokens:
        raise ValueError("one pass over an answer chooses other tokens than the cache does; choose another seed")
    return best


def record_answers(reference: Reference, prompts: list[list[int]], count: int) -> RecordedModel:
    """Greedy answers alone."""
    answers = [greedy_answer(reference, prompt, count) for prompt in prompts]
    return RecordedModel(digest_folder(reference.folder), prompts, answers, NOTHING, NOTHING)


def record_model(reference: Reference, prompts: list[list[int]]) -> RecordedModel:
    """Greedy answers, logits of one position, and what each layer gives out."""
    answers = record_answers(reference, prompts, ANSWER_TOKENS)
    logits = reference.logits(prompts[-1])[-1].astype(np.float32)
    outputs = reference.hidden_states(prompts[STATES_PROMPT])[1:]
    return RecordedModel(answers.checkpoint_digest, prompts, answers.answers, logits, outputs)


def record_case(case: Case, change: str | None) -> RecordedModel:
    """A random checkpoint as it is, with a mistake, or with rounded keys and values."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name), *case)
        if change == ROUNDED_CACHE:
            with rounded_cache_reference(folder) as reference:
                return record_answers(reference, make_prompts(reference.config.vocab_size), ROUNDED_CACHE_TOKENS)
        reference = Reference(folder, break_=change)
        prompts = make_prompts(reference.config.vocab_size)
        return record_model(reference, prompts) if change is None else record_answers(reference, prompts, ANSWER_TOKENS)


def recorded_cases() -> list[tuple[Case, str | None]]:
    """All random checkpoints whose answers are recorded, and what is changed in the reference."""
    plain: list[tuple[Case, str | None]] = [(case, None) for case in MODEL_CASES]
    broken = [(case, break_) for break_, case in BREAK_CASES.items()]
    return [*plain, *broken, *((case, ROUNDED_CACHE) for case in ROUNDED_CACHE_CASES)]


def record_sample() -> RecordedModel:
    """Answers of the FP8 sample model."""
    folder = make_sample_model()
    tokenizer = Tokenizer(folder)
    return record_answers(Reference(folder), [tokenizer.encode(prompt) for prompt in SAMPLE_PROMPTS], SAMPLE_TOKENS)


def measure_yardstick(folder: Path, token_limit: int) -> Yardstick:
    """The divergence between orders of float32 sums on a checkpoint."""
    between_orders = Reference(folder).kl_between_orders(*make_sequences(token_limit))
    return Yardstick(digest_folder(folder), float(f"{between_orders:.6g}"))


def make_divergence_folder(root: Path, name: str) -> tuple[Path, int]:
    """The checkpoint on which the yardstick of this name is taken, and the limit of its random tokens."""
    if name == RANKS:
        return make_checkpoint(root, "glm47", "fp8_channel", **GLM47_SHAPE), GLM47_SHAPE["vocab_size"]
    case = next(case for case in DIVERGENCE_CASES if recorded_name(*case) == name)
    return make_checkpoint(root, *case), DIVERGENCE_TOKEN_LIMIT


def write_yardsticks(path: Path) -> None:
    """Write the divergence between orders on every checkpoint that needs it."""
    yardsticks = {}
    for name in [*(recorded_name(*case) for case in DIVERGENCE_CASES), RANKS]:
        with tempfile.TemporaryDirectory() as root:
            yardsticks[name] = asdict(measure_yardstick(*make_divergence_folder(Path(root), name)))
    path.write_text(json.dumps(yardsticks, indent=2) + "\n", encoding="utf-8")


def write_kept_tokens(path: Path) -> None:
    """Write which tokens transformers keeps with each setting."""
    settings = [one for one in SETTINGS_THAT_CUT if one.get("top_k", 0) <= KEPT_VOCAB_SIZE]
    kept = np.packbits(np.stack([kept_by_transformers(one) for one in settings]), axis=-1)
    np.savez_compressed(path, kept_bits=kept, vocab_size=KEPT_VOCAB_SIZE, settings=json.dumps(settings))


def writers() -> dict[str, Callable[[], object]]:
    """What writes each recorded file, by the name of the file."""
    found: dict[str, Callable[[], object]] = {
        "kept_tokens.npz": lambda: write_kept_tokens(RECORDED / "kept_tokens.npz"),
        "divergence.json": lambda: write_yardsticks(RECORDED / "divergence.json"),
        f"{SAMPLE}.npz": lambda: record_sample().write(RECORDED / f"{SAMPLE}.npz"),
    }
    for case, change in recorded_cases():
        path = RECORDED / f"{recorded_name(*case, change)}.npz"
        found[path.name] = partial(write_case, case, change, path)
    return found


def write_case(case: Case, change: str | None, path: Path) -> None:
    """Record one random checkpoint."""
    record_case(case, change).write(path)


def main() -> None:
    """Write the named files, or all."""
    every = writers()
    names = {Path(name).stem: name for name in every}
    unknown = [name for name in sys.argv[1:] if name not in names]
    if unknown:
        sys.exit(f"store: nothing is recorded as {', '.join(unknown)}; names are {', '.join(names)}")
    RECORDED.mkdir(exist_ok=True)
    for name in sys.argv[1:] or list(names):
        every[names[name]]()
        print(f"{names[name]}: {(RECORDED / names[name]).stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
