"""The flags of `glint bench rank` and `glint bench kernels`."""

import argparse
from itertools import pairwise

from glint.bench.rank_shapes import KNOWN_MODELS
from glint.bench.serving_flags import count, counts, natural, positive
from glint.engine.drafts import MAX_SPECULATIVE_TOKENS
from glint.flags import add_engine_args, path


def add_rank_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every flag of `glint bench rank`."""
    model = parser.add_argument_group("model and engine")
    model.add_argument(
        "--model",
        metavar="NAME",
        default="glm-4.7",
        help=f"shapes to measure: {', '.join(KNOWN_MODELS)}, in FP8, also as a hub writes them, such as "
        "zai-org/GLM-4.5-Air; or a folder whose config.json says them (default: glm-4.7)",
    )
    model.add_argument(
        "--tp",
        metavar="N",
        type=count,
        default=8,
        help="ranks (GPUs), one of which is measured; 1 measures the whole model; glm-4.5-air fits into one GPU of "
        "141 GB with --tp 1, into two of 80 GB with --tp 2 (default: 8)",
    )
    add_engine_args(model, "expert_layout")
    model.add_argument("--engine", metavar="FILE", type=path, help="native library (default: the one of --device)")
    add_engine_args(model, "device", "kernels", "kv_cache_dtype", device="cuda")
    model.add_argument(
        "--threads", metavar="N", type=count, help="CPU threads (default: the cores this process may use)"
    )
    model.add_argument(
        "--gpu-memory-utilization",
        metavar="SHARE",
        type=positive,
        default=0.9,
        help="share of the GPU's memory to use, over 0 and up to 1 (default: 0.9)",
    )
    _add_measured(parser.add_argument_group("what is measured"))
    _add_projected(parser.add_argument_group("what is projected"))
    _add_b200(
        parser.add_argument_group(
            "what is projected for B200",
            "With --kernels portable, the set that a B200 runs: bytes and operations of each part of a step over the "
            "ceilings of a B200, each reached by the share that the kernels reach here.",
        )
    )
    parser.add_argument("--json", metavar="FILE", type=path, help="also write the figures to this file as JSON")


def _add_measured(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch",
        metavar="N[,N]",
        type=counts,
        default=(1, 8, 64, 256),
        help="requests that decode together, one row for each number (default: 1,8,64,256)",
    )
    group.add_argument(
        "--context",
        metavar="N[,N]",
        type=counts,
        default=(512, 4096),
        help="tokens that each request has before the measured steps (default: 512,4096)",
    )
    group.add_argument(
        "--steps", metavar="N", type=count, default=60, help="decode steps to time for each row (default: 60)"
    )
    group.add_argument(
        "--warm-up",
        metavar="N",
        type=count,
        default=20,
        help="decode steps before them that are not timed (default: 20)",
    )
    group.add_argument(
        "--prefill", metavar="N[,N]", type=counts, default=(4096,), help="tokens of a prefill step (default: 4096)"
    )
    group.add_argument(
        "--cached",
        metavar="N[,N]",
        type=_naturals,
        default=(0,),
        help="tokens of context before each prefill step, such as 0,28672 (default: 0)",
    )
    group.add_argument(
        "--speculative",
        metavar="K",
        type=_drafts,
        default=0,
        help="also measure every decode row with K drafts of the MTP layer, which each step verifies and makes anew "
        f"(1 to {MAX_SPECULATIVE_TOKENS}; default: not measured)",
    )
    group.add_argument(
        "--acceptance",
        metavar="A[,A]",
        type=_chances,
        default=(),
        help="chances assumed that the first 1, 2 and up to K drafts are all right, such as 0.7,0.5,0.35; random "
        "weights cannot measure them (default: none, then steps are shown and tokens are not)",
    )


def _add_projected(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--all-reduce-us",
        metavar="US",
        type=positive,
        default=10.0,
        help="microseconds assumed for each all-reduce of a decode step, of which a layer has 2, whatever its bytes "
        "(default: 10)",
    )
    group.add_argument(
        "--collective-gbs",
        "--exchange-gbs",
        metavar="GB/S",
        type=positive,
        default=300.0,
        help="GB/s assumed for what a GPU sends in a prefill step (default: 300)",
    )
    group.add_argument("--requests", metavar="N", type=count, default=64, help="requests at once (default: 64)")
    group.add_argument("--prompt-len", metavar="N", type=count, default=256, help="tokens of a prompt (default: 256)")
    group.add_argument("--gen-len", metavar="N", type=count, default=256, help="tokens of an answer (default: 256)")


def _add_b200(group: argparse._ArgumentGroup) -> None:
    for flag, unit, default, text in (
        ("--b200-tbs", "TB/S", 7.67, "its memory bandwidth, from pytorch/ao issue 4002; NVIDIA's data sheet says 7.7"),
        (
            "--b200-tflops",
            "TFLOP/S",
            409.0,
            "its product rate with mma.sync: what a plain BF16 kernel of gau-nernst/learn-cuda reaches, so rather low",
        ),
        (
            "--mma-tflops",
            "TFLOP/S",
            622.0,
            "the product rate of mma.sync on the measured GPU: 62.9%% of the 989 of the data sheet of an H100 or H200; "
            "a loop of FP16 products alone reached 612 on an H200",
        ),
        ("--b200-all-reduce-us", "US", 10.0, "microseconds of each collective of a decode step, assumed as here"),
        (
            "--b200-collective-gbs",
            "GB/S",
            600.0,
            "GB/s that a GPU sends in a prefill step: twice that of here, as NVLink 5 is to NVLink 4",
        ),
    ):
        help_text = f"{text} (default: {default:g})"
        group.add_argument(flag, metavar=unit, type=positive, default=default, help=help_text)


def add_kernels_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every flag of `glint bench kernels`."""
    add_engine_args(parser, "device", device="cuda")
    parser.add_argument(
        "--build-dir", metavar="DIR", type=path, help="folder of libglint_cuda_test.so (default: build of the checkout)"
    )


def _naturals(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(natural(part.strip()) for part in text.split(",")))


def _drafts(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_SPECULATIVE_TOKENS:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 to {MAX_SPECULATIVE_TOKENS}")
    return int(text)


def _chances(text: str) -> tuple[float, ...]:
    chances = tuple(_chance(part.strip()) for part in text.split(","))
    for earlier, later in pairwise(chances):
        if later > earlier:
            raise argparse.ArgumentTypeError(
                f"'{text}' rises from {earlier:g} to {later:g}, but more drafts are not right more often; give the "
                "chances that the first 1, 2 and more drafts are all right, such as 0.7,0.5,0.35"
            )
    return chances


def _chance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a chance from 0 to 1; give such as 0.7,0.5,0.35")
    return value
