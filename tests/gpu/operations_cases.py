"""Shapes of the operations: those of one of eight ranks of GLM-4.7, and odd ones."""

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from tests.cpu.operations import GemmCase, Operations
from tests.cpu.sampling_rows import Row, random_row
from tests.gpu.operations_experts import ExpertLayout
from tests.gpu.operations_inputs import GemmShape, Heads, source
from tests.reference.numpy_ops import FloatArray, RouterRule

REPEATS = int(os.environ.get("GLINT_TEST_REPEATS") or 1000)
COUNTS = (1, 2, 3, 7, 8, 9, 16, 17, 33, 63, 64, 65, 127, 256, 1000)
FEW_COUNTS = (1, 3, 64, 1000)
REPEATED_COUNTS = (1, 9, 64, 256)
CPU_THREADS = 16
CLOSE_CALL = 1e-5

GEMMS = {
    shape.name: shape
    for shape in (
        GemmShape("qkv", 1792, 5120, "channel", has_bias=True),
        GemmShape("o", 5120, 1536, "channel", margin=4),
        GemmShape("dense gate and up", 3072, 5120, "channel"),
        GemmShape("shared gate and up", 384, 5120, "channel"),
        GemmShape("one scale", 1000, 2048, "tensor", has_bias=True, margin=3),
        GemmShape("scales by tile", 1792, 5120, "tile"),
        GemmShape("lm_head", 18944, 5120, None),
        GemmShape("odd", 37, 200, "channel", has_bias=True, margin=1),
        GemmShape("odd rows", 131, 384, "channel", has_bias=True, margin=3),
        GemmShape("odd rows, 5 steps", 77, 640, "channel", has_bias=True),
        GemmShape("odd rows, 9 steps", 200, 1152, "channel", has_bias=True),
        GemmShape("odd rows, 15 steps", 200, 1920, "channel", has_bias=True),
        GemmShape("odd tiles", 200, 300, "tile", has_bias=True, margin=2),
        GemmShape("odd BF16", 77, 130, None, has_bias=True, margin=3),
        GemmShape("BF16 with bias", 515, 1024, None, has_bias=True),
    )
}
ROW_COUNT_GEMMS = {
    "qkv": GemmShape("qkv", 1792, 5120, "channel", has_bias=True),
    "o": GemmShape("o", 5120, 1536, "channel"),
    "shared": GemmShape("shared gate and up", 384, 5120, "channel"),
    "tile": GemmShape("tile", 520, 5120, "tile"),
    "BF16": GemmShape("BF16", 520, 5120, None, has_bias=True),
}
HEADS = {
    "glm47": Heads(12, 1, 128, 64, has_norms=True),
    "glm45": Heads(12, 1, 128, 64, has_norms=False),
    "two": Heads(6, 2, 64, 32, has_norms=True),
    "whole": Heads(6, 3, 32, 32, has_norms=False, theta=1e5),
    "odd": Heads(2, 2, 36, 18, has_norms=True),
    "odd rotary": Heads(5, 1, 98, 70, has_norms=True),
    "sixteen": Heads(16, 1, 80, 40, has_norms=True),
}
DECODE = tuple((first, 1) for first in (0, 1, 62, 63, 64, 511, 1022, 1023, 1024, 1025, 2500, 4095, 4096))
PREFILL = ((0, 2), (0, 37), (64, 5), (1000, 130), (2040, 65), (1023, 2), (0, 300))
MIXED = ((0, 65), (700, 1), (129, 3), (0, 1), (1100, 18), (200, 1))
LAYOUTS = {
    "tp8": ExpertLayout(160, 0, 160, 5120, 192, 8, is_hopper=True),
    "ep8": ExpertLayout(160, 40, 60, 5120, 1536, 8, is_hopper=True),
    "tp8 portable": ExpertLayout(160, 0, 160, 5120, 192, 8, is_hopper=False),
    "odd": ExpertLayout(10, 2, 8, 200, 56, 3, is_hopper=False),
    "one expert": ExpertLayout(32, 31, 32, 160, 16, 8, is_hopper=False),
    "odd tiles": ExpertLayout(12, 0, 12, 300, 144, 4, is_hopper=False, kind="tile"),
    "odd BF16": ExpertLayout(10, 0, 9, 136, 72, 3, is_hopper=False, kind=None),
}
RULES = {
    "glm47": (160, 5120, RouterRule(8, True, 2.5)),
    "six": (64, 320, RouterRule(6, True, 1.5)),
    "odd": (24, 201, RouterRule(3, False, 1.0)),
    "odd experts": (200, 1003, RouterRule(8, True, 2.5)),
    "narrow": (128, 1000, RouterRule(8, True, 2.5)),
    "most experts": (512, 5120, RouterRule(8, True, 2.5)),
}


@dataclass(frozen=True)
class ExpectedGemm:
    """A GEMM of the most rows, and what the CPU makes of some of them."""

    case: GemmCase
    chosen: np.ndarray
    rows: FloatArray


@cache
def expected_gemm(shape: GemmShape) -> ExpectedGemm:
    """All rows of a small GEMM, of a large one the last row of every count and a few more."""
    case = shape.case(max(COUNTS))
    few = {count - 1 for count in COUNTS} | set(source(shape.rows).integers(0, max(COUNTS), 7).tolist())
    chosen = np.arange(max(COUNTS)) if shape.rows * shape.cols < 200_000 else np.array(sorted(few))
    with Operations("exact", CPU_THREADS) as operations:
        rows = operations.gemm(GemmCase(case.rows[chosen], case.weight, case.bias))
    return ExpectedGemm(case, chosen, rows)


def is_close_call(selection: FloatArray, rule: RouterRule) -> bool:
    """Whether the choice of experts hangs on less than CLOSE_CALL between two scores."""
    scores = np.sort(selection)[::-1]
    return bool(scores[rule.experts_per_token - 1] - scores[rule.experts_per_token] < CLOSE_CALL)


def sampler_rows(vocab_size: int) -> list[Row]:
    """Rows with every setting: greedy ones, seeded ones, penalties, bias and masks."""
    numbers = source(vocab_size)
    rows = []
    for index in range(64):
        row = random_row(int(numbers.integers(0, 2**31)), vocab_size)
        settings: dict[str, Any] = {"has_logprobs": 1, "num_logprobs": index % 21}
        settings["seed"] = int(numbers.integers(0, 2**63))
        settings["temperature"] = 0.0 if index % 4 == 0 else float(numbers.uniform(0.2, 1.7))
        if index % 3 == 1:
            settings["top_p"] = float(numbers.uniform(0.3, 0.99))
        if index % 5 == 2:
            settings["top_k"] = int(numbers.integers(1, 200))
        if index % 7 == 3:
            settings["min_p"] = float(numbers.uniform(0, 0.2))
        if index % 2:
            settings |= {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": -0.3}
        rows.append(replace(row, settings=settings))
    return rows
