"""The self-test of the CUDA engine: random models of the families' shapes on the GPU and on the CPU.

The GPU answers prompts greedily; the CPU then reads prompt and answer as one prompt, so both give log-probabilities of
the same tokens at the same positions. The error of a position is the largest difference over the tokens that both name.
An answer must also be the same, bit by bit, however the GPU computes it: alone, in batches, in chunks.

FP8 activations are rounded, so the smallest difference grows to the size of a rounding within a few products, and
bounds are on the median and on the 95th percentile of positions. Seen on the CPU: with noise of 1.3e-4 in the scales,
as large as that of Hopper's short accumulator; with keys and values rounded to E4M3; with a mistake in all positions
(experts weighted by 0.8, the wrong rotary base, 7 experts instead of 8, a sixteenth of the output projection lost, no
bias); and with one expert lost.

| median, 95th percentile | noise | rounded pages | mistake | one expert |
|---|---|---|---|---|
| one layer, FP8 weights | 0.23, 0.37 | 0.44, 1.3 | from 0.58 | 0, from 0.77 |
| one layer, BF16 weights | | 0.08, 0.23 | from 0.43 | |
| two layers, FP8 weights | 0.47, 1.2 | 0.70, 1.4 | from 0.51 | |

A second layer doubles the noise, so models of two layers show only whether layers follow each other.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import CDLL
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from glint.bench.rank_shapes import GLM_47
from glint.checkpoint.config import ModelConfig
from glint.checkpoint.quantisation import ScaleKind
from glint.checkpoint.table import Checkpoint
from glint.engine.args import Device, EngineArgs, Kernels, KvCacheDtype
from glint.engine.native_options import native_options
from glint.engine.request import ActiveRequest
from glint.engine.settings import DEFAULT_PAGE_TOKENS, EngineSettings
from glint.errors import EngineError
from glint.gpu.random_model import write_random_model
from glint.native import abi
from glint.native.library import NativeEngine
from glint.sampling import SamplingParams

Positions = dict[int, dict[int, float]]

NEW_TOKENS = 6
NUM_LOGPROBS = 20
STEP_TOKENS = 4096
LONGEST = 1200
NUM_SHORT_PROMPTS = 10
BATCHES = (8, 64, 200)
CHUNKS = (7, 200)
GREEDY = SamplingParams(temperature=0.0, logprobs=NUM_LOGPROBS, prompt_logprobs=NUM_LOGPROBS)
SEEDED = SamplingParams(temperature=0.8, top_p=0.95, top_k=60, min_p=0.01, repetition_penalty=1.1)
LEAST_SHARE = 0.9
LEAST_DRAWN = 0.7
ONE_LAYER = {"bf16": (0.4, 0.6), "fp8": (0.7, 2.0)}
ONE_BF16_LAYER = {"bf16": (0.25, 0.6), "fp8": (0.3, 1.2)}
TWO_LAYERS = {"bf16": (0.7, 2.0)}


@dataclass(frozen=True)
class CheckedModel:
    """A model of the self-test: shapes, the lengths of the prompts that the CPU computes too, ranks.

    `bounds` has, by what pages hold, the most that median and 95th percentile of the errors may be.
    """

    name: str
    config: ModelConfig
    prompt_lengths: tuple[int, ...] = (270, 33, 5, 1)
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=lambda: ONE_LAYER)
    has_fp8_pages: bool = False
    has_sampling: bool = False
    tp: int = 1


SMALL = replace(
    GLM_47,
    vocab_size=4096,
    mtp_vocab_size=4096,
    hidden_size=1024,
    num_layers=1,
    num_dense_layers=0,
    num_heads=8,
    num_kv_heads=2,
    dense_width=2048,
    expert_width=128,
    shared_width=128,
    num_experts=16,
    max_positions=4096,
)
RANK = replace(
    SMALL,
    hidden_size=GLM_47.hidden_size,
    num_heads=12,
    num_kv_heads=1,
    dense_width=1536,
    expert_width=192,
    shared_width=192,
    num_experts=32,
)
AIR = replace(
    SMALL,
    hidden_size=4096,
    num_heads=96,
    num_kv_heads=8,
    dense_width=10944,
    expert_width=1408,
    shared_width=1408,
    has_qk_norm=False,
    routed_scaling=1.0,
)
AIR_RANK = replace(AIR, num_heads=12, num_kv_heads=1, dense_width=1368, expert_width=176, shared_width=176)
MODELS = (
    CheckedModel(
        "GLM-4.7, rank of 8", RANK, prompt_lengths=(1100, 129, 64, 33, 5, 1), has_fp8_pages=True, has_sampling=True
    ),
    CheckedModel("GLM-4.7, rank of 8, dense layer", replace(RANK, num_layers=2, num_dense_layers=1), bounds=TWO_LAYERS),
    CheckedModel("GLM-4.5-Air", AIR, has_fp8_pages=True),
    CheckedModel(
        "GLM-4.5-Air, rank of 8, dense layer", replace(AIR_RANK, num_layers=2, num_dense_layers=1), bounds=TWO_LAYERS
    ),
    CheckedModel("scales by tile", replace(SMALL, num_experts=160, weight_scale_kind=ScaleKind.TILE)),
    CheckedModel("one scale", replace(SMALL, weight_scale_kind=ScaleKind.TENSOR)),
    CheckedModel(
        "BF16 weights",
        replace(SMALL, weight_scale_kind=ScaleKind.NONE, scale_suffix=None),
        bounds=ONE_BF16_LAYER,
        has_fp8_pages=True,
    ),
)


def models_for(num_devices: int) -> tuple[CheckedModel, ...]:
    """The models for a machine: with several GPUs also one that they share."""
    tp = max(count for count in (1, 2, 4, 8) if count <= num_devices)
    return MODELS if tp == 1 else (*MODELS, CheckedModel(f"GLM-4.5-Air, {tp} ranks", AIR, tp=tp))


class Row(NamedTuple):
    """One line of the self-test."""

    model: str
    check: str
    value: str
    bound: str
    has_passed: bool


@dataclass
class Answer:
    """The tokens of a request and the log-probabilities of its positions. Equal answers are so bit by bit."""

    tokens: list[int] = field(default_factory=list)
    logprobs: Positions = field(default_factory=dict)


@dataclass(frozen=True)
class Libraries:
    """The library under test, its kernels, and the CPU library that it is held to."""

    tested: CDLL
    device: Device
    kernels: Kernels
    cpu: CDLL


def run_self_test(
    libraries: Libraries, say: Callable[[str], None], models: Sequence[CheckedModel] = MODELS
) -> Iterator[Row]:
    """Compute every model on both engines; gives a row for each check as it is done.

    An engine that fails gives a failed row with its words, and the next model follows.
    """
    for model in models:
        started = time.monotonic()
        say(f"{model.name}: writing random weights")
        with tempfile.TemporaryDirectory(prefix="glint-check-") as folder:
            try:
                checkpoint = write_random_model(Path(folder) / "weights", model.config)
                yield from check_model(libraries, model, checkpoint, say)
            except EngineError as problem:
                yield Row(model.name, "runs", str(problem), "", False)
            except OSError as problem:
                yield Row(model.name, "weights", f"{problem}; give TMPDIR a folder with 1 GB of room", "", False)
        say(f"{model.name}: {time.monotonic() - started:.0f} s")


def check_model(
    libraries: Libraries, model: CheckedModel, checkpoint: Checkpoint, say: Callable[[str], None]
) -> Iterator[Row]:
    """The checks of one model."""
    lengths = (*model.prompt_lengths, *range(2, 2 + NUM_SHORT_PROMPTS))
    prompts = [make_prompt(model, index, length) for index, length in enumerate(lengths)]
    with open_engine(libraries.cpu, checkpoint, EngineArgs(device="cpu", kernels="auto", tp=model.tp)) as cpu:
        kinds: tuple[KvCacheDtype, ...] = ("bf16", "fp8") if model.has_fp8_pages else ("bf16",)
        for pages in kinds:
            say(f"{model.name}: {pages.upper()} pages on the GPU")
            args = EngineArgs(
                device=libraries.device,
                kernels=libraries.kernels,
                tp=model.tp,
                kv_cache_dtype=pages if libraries.device == "cuda" else "auto",
            )
            with open_engine(libraries.tested, checkpoint, args) as gpu:
                answers = [answer_all(gpu, [prompt])[0] for prompt in prompts]
                checks = [*same_bits(gpu, model, prompts, answers)]
                if model.has_sampling and pages == "bf16":
                    checks.append(same_samples(gpu, cpu, model))
                gpu.check()
            say(f"{model.name}: {pages.upper()} pages on the CPU")
            checks = [*agreement(cpu, prompts, answers, model.bounds[pages]), *checks]
            yield from (Row(f"{model.name}, {pages.upper()} pages", *check) for check in checks)


Check = tuple[str, str, str, bool]


def agreement(
    cpu: NativeEngine, prompts: list[tuple[int, ...]], answers: list[Answer], bounds: tuple[float, float]
) -> Iterator[Check]:
    """How far log-probabilities are from the CPU's, in prompts and in answers, and whether answers are its best."""
    whole = [(*prompt, *answer.tokens[:-1]) for prompt, answer in zip(prompts, answers, strict=True)]
    expected = [answer_all(cpu, [tokens], new_tokens=1)[0].logprobs for tokens in whole]
    for name, is_prompt in (("prefill", True), ("decode", False)):
        errors = [
            position_error(found, expected[index][position])
            for index, answer in enumerate(answers)
            for position, found in answer.logprobs.items()
            if (position < len(prompts[index])) == is_prompt
        ]
        for what, share, bound in zip(("median", "19 of 20"), (0.5, 0.95), bounds, strict=True):
            value = float(np.quantile(errors, share, method="higher"))
            yield f"{name}, error of log-probabilities, {what}", f"{value:.4f}", f"at most {bound}", value <= bound
    behind = [
        max(row.values()) - row.get(token, -np.inf)
        for index, answer in enumerate(answers)
        for step, token in enumerate(answer.tokens)
        for row in [expected[index][len(prompts[index]) + step]]
    ]
    share = float(np.mean(np.array(behind) <= bounds[1]))
    yield (
        "decode, greedy tokens near the CPU's best",
        f"{share:.0%}",
        f"at least {LEAST_SHARE:.0%}",
        share >= LEAST_SHARE,
    )


def position_error(found: dict[int, float], expected: dict[int, float]) -> float:
    """The largest difference over the tokens that both name; infinite where they share none or one is no number."""
    errors = [abs(value - expected[token]) for token, value in found.items() if token in expected]
    return max(errors, default=np.inf) if np.isfinite(errors).all() else np.inf


def same_bits(
    gpu: NativeEngine, model: CheckedModel, prompts: list[tuple[int, ...]], answers: list[Answer]
) -> Iterator[Check]:
    """Whether answers keep their bits in chunks of the prompt, and in batches of many requests."""
    for chunk in CHUNKS:
        again = answer_all(gpu, prompts, chunk=chunk)
        yield count_alike(f"prompts in chunks of {chunk}, together", again, answers)
    short = [make_prompt(model, 1000 + index, 1 + index % 17) for index in range(max(BATCHES))]
    alone = [answer_all(gpu, [prompt])[0] for prompt in short]
    for batch in BATCHES:
        yield count_alike(f"decode, batch of {batch} as alone", answer_all(gpu, short[:batch]), alone[:batch])


def count_alike(name: str, found: Sequence[Answer], expected: Sequence[Answer]) -> Check:
    """A check that all answers are equal."""
    alike = sum(one == other for one, other in zip(found, expected, strict=True))
    return name, f"{alike} of {len(expected)}", "all, bit by bit", alike == len(expected)


def same_samples(gpu: NativeEngine, cpu: NativeEngine, model: CheckedModel) -> Check:
    """Whether seeded requests draw the CPU's tokens.

    FP8 products of wgmma move logits enough to change one draw in six; a broken sampler shares almost none.
    """
    prompts = [make_prompt(model, 2000 + index, 1 + index % 9) for index in range(BATCHES[1])]
    drawn, expected = (answer_all(engine, prompts, new_tokens=1, params=SEEDED) for engine in (gpu, cpu))
    share = float(np.mean([one.tokens == other.tokens for one, other in zip(drawn, expected, strict=True)]))
    return "sampled tokens the CPU's", f"{share:.0%}", f"at least {LEAST_DRAWN:.0%}", share >= LEAST_DRAWN


def make_prompt(model: CheckedModel, seed: int, length: int) -> tuple[int, ...]:
    """Random tokens."""
    return tuple(np.random.default_rng(seed).integers(0, model.config.vocab_size, length).tolist())


def open_engine(library: CDLL, checkpoint: Checkpoint, args: EngineArgs) -> NativeEngine:
    """An engine with room for every batch."""
    page_tokens = DEFAULT_PAGE_TOKENS[args.device]
    num_pages = max(BATCHES) + len(CHUNKS) * 2 * LONGEST // page_tokens
    settings = EngineSettings.resolve(
        checkpoint.folder,
        checkpoint.config,
        replace(
            args,
            num_pages=num_pages + max(BATCHES),
            max_step_tokens=STEP_TOKENS,
            max_num_seqs=max(BATCHES),
            max_model_len=LONGEST,
        ),
    )
    options = native_options(settings, checkpoint.config, checkpoint.files)
    return NativeEngine(library, options, checkpoint.tensor_array())


_salt = iter(range(1, 2**62))


def answer_all(
    engine: NativeEngine,
    prompts: Sequence[tuple[int, ...]],
    chunk: int = STEP_TOKENS,
    new_tokens: int = NEW_TOKENS,
    params: SamplingParams = GREEDY,
) -> list[Answer]:
    """Run the prompts together, each advancing by up to `chunk` tokens a step; nothing comes from the prefix cache."""
    answers = {}
    for index, prompt in enumerate(prompts):
        request = ActiveRequest(
            request_id=index,
            prompt_tokens=prompt,
            params=params,
            seed=index,
            choice_index=0,
            cache_salt=next(_salt),
            stop_tokens=(),
            max_new_tokens=new_tokens,
            text=None,
        )
        answers[engine.add_request(request.to_native())] = Answer()
    running = list(answers)
    while running:
        ticket = engine.submit_step([(request_id, chunk) for request_id in running])
        engine.sample_step(ticket)
        running = []
        for item in engine.collect_step(ticket).items:
            answers[item.request_id].tokens += item.tokens
            answers[item.request_id].logprobs |= item.logprobs
            if item.finish_reason == abi.FINISH_FAILED:
                raise EngineError(f"a request failed with code {item.failure}: logits were not finite")
            if item.finish_reason == abi.FINISH_NONE:
                running.append(item.request_id)
    for request_id in answers:
        engine.free_request(request_id)
    return list(answers.values())
