"""The options of an engine. Each is written once: name, type, default, flags and native field.

The command line, `LLM`, the server and the native engine take their options from here. This module imports nothing
heavy, so `glint --help` answers at once.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast, get_args, get_type_hints

from glint.checkpoint.layout import ExpertLayout

Device = Literal["cpu", "cuda"]
KvCacheDtype = Literal["auto", "bf16", "fp8"]
Kernels = Literal[
    "auto", "exact", "plain", "neon", "neon_bf16", "avx2", "avx512", "avx512_bf16", "amx", "portable", "hopper"
]
SequenceParallel = Literal["auto", "off", "on"]
AllReduce = Literal["auto", "nccl", "custom"]
NumDrafts = int | Literal["auto"]


@dataclass(frozen=True)
class Flag:
    """How the command line spells an option, between spaces, and what its help says.

    `otherwise` says what holds where the flag is left out. `native` is the field of the ABI where it has another name.
    `parse` reads the text where the type of the option does not; it raises ValueError with the way out.
    """

    spellings: str
    help: str
    metavar: str | None = None
    otherwise: str | None = None
    native: str | None = None
    parse: Callable[[str], Any] | None = None


def parse_num_drafts(text: str) -> NumDrafts:
    """A number of drafts, "auto", or vLLM's JSON object with the method mtp and a number."""
    if text == "auto":
        return "auto"
    if not text.lstrip().startswith("{"):
        return int(text)
    config = json.loads(text)
    method = config.pop("method", "mtp")
    count = config.pop("num_speculative_tokens", "auto")
    if not str(method).endswith("mtp") or config or (count != "auto" and type(count) is not int):
        raise ValueError(f"only the method mtp with num_speculative_tokens is known, not {text}")
    return cast(NumDrafts, count)


@dataclass(frozen=True, kw_only=True)
class EngineChoices:
    """The options that depend neither on the machine nor on the model."""

    device: Annotated[Device, Flag("--device", "where to compute; cuda needs an NVIDIA GPU and libglint_cuda.so")] = (
        "cpu"
    )
    kv_cache_dtype: Annotated[
        KvCacheDtype,
        Flag(
            "--kv-cache-dtype",
            "with --device cuda, what keys and values are kept in: fp8 (E4M3) takes about half the memory of bf16 and "
            "changes answers a little",
            otherwise="auto, bf16",
            native="kv_dtype",
        ),
    ] = "auto"
    tp: Annotated[
        int,
        Flag(
            "--tp -tp --tp-size --tensor-parallel-size",
            "ranks that share the model: one GPU each with --device cuda, threads on the CPU",
            "N",
            native="num_ranks",
        ),
    ] = 1
    expert_layout: Annotated[
        ExpertLayout, Flag("--expert-layout", "tp: every rank a slice of every expert; ep: whole experts per rank")
    ] = "tp"
    sequence_parallel: Annotated[
        SequenceParallel,
        Flag(
            "--sequence-parallel",
            "how ranks share the rows of a step: off: every rank has all of them (all-reduce); on: each has its part "
            "between the layers (reduce-scatter and all-gather); auto: on for many tokens; the answers are the same",
        ),
    ] = "auto"
    all_reduce: Annotated[
        AllReduce,
        Flag(
            "--all-reduce",
            "with --device cuda, what carries the sums between GPUs: NCCL, or our own kernel over peer memory, which "
            "needs GPUs that reach each other; auto: custom for small sums where it can; the answers are the same",
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class EngineArgs(EngineChoices):
    """The options that a user sets. `EngineSettings.resolve` fills in those that are None.

    `tp` is the number of ranks. Rows that ranks sum up have `row_slices` parts with a scale of their own: answers are
    the same at every `tp` where `row_slices` is. `sequence_parallel` and `all_reduce` choose how ranks share rows and
    sums, `num_speculative_tokens` how many drafts a step verifies; they change no answer. "auto" means no drafts
    where the checkpoint has no MTP layer. `num_pages`, `kv_cache_bytes` and `gpu_memory_utilization` size the page
    cache, `page_tokens` one page. A step computes at most `max_step_tokens` tokens of at most `max_num_seqs`
    requests. `max_model_len` bounds prompt and answer together.
    """

    num_speculative_tokens: Annotated[
        NumDrafts,
        Flag(
            "--num-speculative-tokens --speculative-num-steps --speculative-config",
            "tokens that the model's MTP layer drafts for each step to verify: 0 to 8; auto: 0 to 4, as measured "
            "acceptance and times suggest; vLLM's JSON is taken too; the answers are the same",
            "N",
            "auto where the checkpoint has the layer",
            native="max_draft_tokens",
            parse=parse_num_drafts,
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        Flag(
            "--threads",
            "CPU threads, shared by all ranks, each of which has at least one",
            "N",
            "the cores this process may use",
            native="num_threads",
        ),
    ] = None
    kernels: Annotated[
        Kernels | None,
        Flag(
            "--kernels",
            "kernel set: portable and hopper with --device cuda, the others on the CPU, where exact accumulates in "
            "FP64 and is slow",
            otherwise="$GLINT_KERNELS, else auto, the best of the machine",
        ),
    ] = None
    row_slices: Annotated[
        int | None,
        Flag(
            "--row-slices",
            "parts of a row that have a scale of their own, --tp times a power of two; answers are the same at every "
            "--tp that has the same --row-slices; with --device cuda it is always --tp",
            "N",
            "--tp",
        ),
    ] = None
    max_model_len: Annotated[
        int | None,
        Flag(
            "--max-model-len --context-length",
            "longest prompt and answer together",
            "TOKENS",
            "what the model and the page cache allow",
            native="max_context_tokens",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Flag(
            "--max-num-seqs --max-running-requests",
            "most requests in one step",
            "N",
            "64, with --device cuda 256",
            native="max_step_items",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        Flag(
            "--gpu-memory-utilization",
            "with --device cuda: share of the GPU's memory to use, over 0 and up to 1",
            "SHARE",
            "0.9",
        ),
    ] = None
    max_step_tokens: Annotated[
        int | None,
        Flag(
            "--max-num-batched-tokens --chunked-prefill-size",
            "most tokens in one step; longer prompts are cut into chunks",
            "TOKENS",
            "512, with --device cuda 4096",
        ),
    ] = None
    kv_cache_bytes: Annotated[
        int | None,
        Flag(
            "--kv-cache-memory-bytes",
            "bytes of the page cache, of all ranks together; with --device cuda on each GPU",
            "BYTES",
            "on the CPU room for one longest request and at least 384 MiB, on a GPU what "
            "--gpu-memory-utilization leaves",
        ),
    ] = None
    page_tokens: Annotated[
        int | None,
        Flag(
            "--page-size", "tokens of a page, a power of two", "TOKENS", "16; with --device cuda 64, and nothing else"
        ),
    ] = None
    num_pages: int | None = None
    max_requests: int | None = None


FLAGS: dict[str, Flag] = {
    name: part
    for name, hint in get_type_hints(EngineArgs, include_extras=True).items()
    for part in getattr(hint, "__metadata__", ())
}


def value_types(args: type) -> dict[str, Any]:
    """The type of every field of a class: a Literal with the allowed values, or a class. None is left aside."""
    hints = get_type_hints(args)
    return {name: get_args(hint)[0] if type(None) in get_args(hint) else hint for name, hint in hints.items()}
