"""Flags that several commands share, and what they ask for."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glint.llm import LLM

KERNELS = ["auto", "exact", "plain", "neon", "avx2", "avx512", "amx", "portable", "hopper"]
DEVICES = ["cpu", "cuda"]
EXCHANGES = ["auto", "replicated", "sharded"]
ALL_REDUCES = ["auto", "nccl", "custom"]
KV_CACHE_DTYPES = ["auto", "bf16", "fp8"]
RANKS = """\
Several ranks hold a part of the model each and compute every step together. 'glint check MODEL_DIR --tp N' says what
each of them would hold, and why a model cannot be shared by so many."""


def add_engine_flags(parser: argparse.ArgumentParser, has_sizes: bool = True) -> None:
    """Which model runs, on what, and how large."""
    group = parser.add_argument_group("model and engine")
    group.add_argument(
        "--model", "--model-path", metavar="DIR", type=path, help="checkpoint folder (default: the sample model)"
    )
    group.add_argument("--engine", metavar="FILE", type=path, help="native library (default: the one of --device)")
    add_device(group, "cpu")
    group.add_argument(
        "--threads",
        metavar="N",
        type=int,
        help="CPU threads, shared by all ranks, each of which has at least one (default: the cores this process may "
        "use)",
    )
    add_kernels(group)
    add_kv_cache_dtype(group)
    if has_sizes:
        _add_sizes(group)
    _add_ranks(parser.add_argument_group("ranks", RANKS))


def _add_ranks(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tp",
        "-tp",
        "--tp-size",
        "--tensor-parallel-size",
        metavar="N",
        type=int,
        default=1,
        help="ranks that share the model: one GPU each with --device cuda, threads on the CPU (default: 1)",
    )
    add_expert_layout(group)
    group.add_argument(
        "--row-slices",
        metavar="N",
        type=int,
        help="parts of a row that have a scale of their own, --tp times a power of two; answers are the same at every "
        "--tp that has the same --row-slices; with --device cuda it is always --tp (default: --tp)",
    )
    group.add_argument(
        "--exchange",
        choices=EXCHANGES,
        default="auto",
        help="how ranks share the rows of a step: replicated: every rank has all of them; sharded: each has its part "
        "between the layers; auto: sharded for many tokens; the answers are the same (default: auto)",
    )
    group.add_argument(
        "--all-reduce",
        choices=ALL_REDUCES,
        default="auto",
        help="with --device cuda, what carries the sums between GPUs: NCCL, or our own kernel over peer memory, which "
        "needs GPUs that reach each other; auto: custom for small sums where it can; the answers are the same "
        "(default: auto)",
    )


def _add_sizes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-model-len",
        "--context-length",
        metavar="TOKENS",
        type=int,
        help="longest prompt and answer together (default: what the model and the page cache allow)",
    )
    group.add_argument(
        "--max-num-seqs",
        "--max-running-requests",
        dest="max_step_items",
        metavar="N",
        type=int,
        help="most requests in one step (default: 64, with --device cuda 256)",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        metavar="SHARE",
        type=float,
        help="with --device cuda: share of the GPU's memory to use, over 0 and up to 1 (default: 0.9)",
    )


def add_device(parser: argparse._ActionsContainer, default: str) -> None:
    """Where to compute."""
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default=default,
        help=f"where to compute; cuda needs an NVIDIA GPU and libglint_cuda.so (default: {default})",
    )


def add_kernels(parser: argparse._ActionsContainer) -> None:
    """Which kernels compute."""
    parser.add_argument(
        "--kernels",
        choices=KERNELS,
        help="kernel set: portable and hopper with --device cuda, the others on the CPU, where exact accumulates in "
        "FP64 and is slow (default: $GLINT_KERNELS, else auto, the best of the machine)",
    )


def add_kv_cache_dtype(parser: argparse._ActionsContainer) -> None:
    """What keys and values are kept in."""
    parser.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="with --device cuda, what keys and values are kept in: fp8 (E4M3) takes about half the memory of bf16 and "
        "changes answers a little (default: auto, bf16)",
    )


def add_expert_layout(parser: argparse._ActionsContainer) -> None:
    """How experts are spread over ranks."""
    parser.add_argument(
        "--expert-layout",
        choices=["tp", "ep"],
        default="tp",
        help="tp: every rank a slice of every expert; ep: whole experts per rank (default: tp)",
    )


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """How tokens are chosen."""
    group = parser.add_argument_group("sampling", "What is left out follows the model's generation_config.json.")
    group.add_argument(
        "--max-tokens",
        metavar="N",
        type=int,
        default=max_tokens,
        help=f"longest answer, in tokens (default: {max_tokens})",
    )
    group.add_argument("--temperature", metavar="X", type=float, help="0 is greedy, 1 the model's own distribution")
    group.add_argument("--top-k", metavar="N", type=int, help="keep the N likeliest tokens; 0 keeps all")
    group.add_argument(
        "--top-p", metavar="X", type=float, help="keep the likeliest tokens up to this probability, 0 to 1"
    )
    group.add_argument("--min-p", metavar="X", type=float, help="drop tokens below this share of the likeliest, 0 to 1")
    group.add_argument("--repetition-penalty", metavar="X", type=float, help="over 1 makes seen tokens less likely")
    group.add_argument("--frequency-penalty", metavar="X", type=float, help="per occurrence in the answer, -2 to 2")
    group.add_argument("--presence-penalty", metavar="X", type=float, help="once per token of the answer, -2 to 2")
    group.add_argument("--seed", metavar="N", type=int, help="the same seed gives the same answer (default: a new one)")
    group.add_argument("--stop", metavar="TEXT", action="append", help="end before this text; may be repeated")
    group.add_argument(
        "--stop-token",
        metavar="ID",
        type=int,
        action="append",
        dest="stop_token_ids",
        help="end at this token; may be repeated",
    )
    group.add_argument(
        "--logit-bias",
        metavar="ID=X",
        type=bias,
        action="append",
        help="add X, -100 to 100, to the logit of a token; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on past the model's end token")


def path(text: str) -> Path:
    """A path, with ~ for the home folder."""
    try:
        return Path(text).expanduser()
    except RuntimeError as problem:
        raise argparse.ArgumentTypeError(f"'{text}' names no folder: {problem}") from None


def bias(text: str) -> tuple[int, float]:
    """A token id and what is added to its logit."""
    token, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"'{text}' is not ID=X, such as 42=-100")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not ID=X with a token id and a number") from None


SAMPLING_FLAGS = (
    "n",
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)
ENGINE_FLAGS = (
    "device",
    "threads",
    "kernels",
    "kv_cache_dtype",
    "tp",
    "expert_layout",
    "row_slices",
    "exchange",
    "all_reduce",
)
SIZE_FLAGS = ("max_model_len", "max_step_items", "gpu_memory_utilization")


def sampling_changes(chosen: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that the command line sets; the others follow the model."""
    changes = {name: getattr(chosen, name, None) for name in SAMPLING_FLAGS}
    if chosen.logit_bias is not None:
        changes["logit_bias"] = dict(chosen.logit_bias)
    return {name: value for name, value in changes.items() if value is not None}


def model_folder(chosen: argparse.Namespace) -> Path:
    """The model folder that was asked for, or the sample model, which is made if it is not there."""
    if chosen.model is not None:
        return Path(chosen.model)
    from glint.sample.model import make_sample_model

    folder = make_sample_model()
    print(f"glint: no --model given, using the sample model in {folder}", file=sys.stderr)
    return folder


def engine_options(chosen: argparse.Namespace) -> dict[str, Any]:
    """The engine settings that the command line sets, by the names that LLM and size_engine take."""
    sizes = {name: getattr(chosen, name) for name in SIZE_FLAGS if hasattr(chosen, name)}
    return {name: getattr(chosen, name) for name in ENGINE_FLAGS} | sizes


def open_model(chosen: argparse.Namespace) -> LLM:
    """The model and engine of the shared flags, loaded."""
    from glint.llm import LLM

    return LLM(model_folder(chosen), engine=chosen.engine, progress=True, **engine_options(chosen))
