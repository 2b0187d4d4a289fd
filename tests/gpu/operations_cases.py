"""Shapes of the operations besides products: those of one of eight ranks of GLM-4.7, and odd ones."""

import os
from dataclasses import replace
from typing import Any

import numpy as np

from tests.cpu.sampling_rows import Row, random_row
from tests.gpu.operations_cuda import CudaOperations, Family
from tests.gpu.operations_inputs import Heads, source
from tests.reference.numpy_ops import FloatArray, RouterRule

REPEATS = int(os.environ.get("GLINT_TEST_REPEATS") or 1000)
COUNTS = (1, 2, 3, 7, 8, 9, 16, 17, 33, 63, 64, 65, 127, 256, 1000)
FEW_COUNTS = (1, 3, 64, 1000)
REPEATED_COUNTS = (1, 9, 64, 256)
EXPERT_COUNTS = ((1, 1), (64, 64), (64, 40), (65, 65), (256, 256), (1000, 1000))
CPU_THREADS = 16
CLOSE_CALL = 1e-5

HEADS = {
    "glm47": Heads(12, 1, 128, 64, has_norms=True),
    "glm45": Heads(12, 1, 128, 64, has_norms=False),
    "two": Heads(6, 2, 64, 32, has_norms=True),
    "whole": Heads(6, 3, 32, 32, has_norms=False, theta=1e5),
    "odd": Heads(2, 2, 36, 18, has_norms=True),
    "odd rotary": Heads(5, 1, 98, 70, has_norms=True),
    "sixteen": Heads(16, 1, 80, 40, has_norms=True),
}
STEP_HEADS = {
    "glm47": HEADS["glm47"],
    "glm45": HEADS["glm45"],
    "air": Heads(96, 8, 128, 64, has_norms=False),
    "two of 14": Heads(28, 2, 128, 64, has_norms=True),
    "four of 2": Heads(8, 4, 128, 128, has_norms=True),
    "five of 1": Heads(5, 5, 128, 32, has_norms=False),
}
STEP_CASES = (
    *((name, count) for name in ("glm47", "glm45", "four of 2") for count in (1, 13, 64, 300)),
    *((name, count) for name in ("air", "two of 14") for count in (1, 13)),
    ("five of 1", 64),
)
DECODE = tuple((first, 1) for first in (0, 1, 62, 63, 64, 511, 1022, 1023, 1024, 1025, 2500, 4095, 4096))
PREFILL = ((0, 2), (0, 37), (64, 5), (1000, 130), (2040, 65), (1023, 2), (0, 300))
MIXED = ((0, 65), (700, 1), (129, 3), (0, 1), (1100, 18), (200, 1))
RULES = {
    "glm47": (160, 5120, RouterRule(8, True, 2.5)),
    "air": (128, 4096, RouterRule(8, True, 1.0)),
    "six": (64, 320, RouterRule(6, True, 1.5)),
    "odd": (24, 201, RouterRule(3, False, 1.0)),
    "odd experts": (200, 1003, RouterRule(8, True, 2.5)),
    "narrow": (128, 1000, RouterRule(8, True, 2.5)),
    "most experts": (512, 5120, RouterRule(8, True, 2.5)),
}


def open_for(count: int, family: Family = "portable") -> CudaOperations:
    """Operations that run REPEATS times for a few of the row counts and 3 times for the others."""
    return CudaOperations(family, REPEATS if count in REPEATED_COUNTS else 3)


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
