"""Shapes of GEMMs and experts: those of GLM-4.7 and GLM-4.5-Air on 1, 2, 4 and 8 ranks, and odd ones.

The tiled family multiplies with wgmma (`hopper`) or with mma.sync (`portable`). The fallback runs where the tiled
family refuses a shape, and here at some true sizes too. Each list of runs names every shape with every family.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tests.cpu.operations import GemmCase, Operations
from tests.gpu.operations_cases import COUNTS, CPU_THREADS, EXPERT_COUNTS
from tests.gpu.operations_cuda import Family
from tests.gpu.operations_experts import ExpertLayout
from tests.gpu.operations_inputs import GemmShape, source
from tests.reference.numpy_ops import FloatArray

TILED: tuple[Family, ...] = ("hopper", "portable")
ALL_FAMILIES: tuple[Family, ...] = (*TILED, "fallback")
RANKS = (1, 2, 4, 8)
RANK_COUNTS = (1, 16, 64, 65, 300, 1000)
PART_COUNTS = ((1, 1), (64, 40), (200, 200), (300, 300))
MANY_ROWS = 4096
ROWS_PAST_ALL_SWITCHES = 1100
EVERY_ROW_LIMIT = 200_000


@dataclass(frozen=True)
class ModelShape:
    """What of a model the shapes of its products follow from; 96 heads of 128 on 8 KV heads in both models."""

    name: str
    hidden_size: int
    dense_width: int
    expert_width: int
    num_experts: int
    qkv_rows: int = (96 + 2 * 8) * 128
    heads_width: int = 96 * 128

    def gemms(self, ranks: int) -> list[GemmShape]:
        """The dense products of one of so many ranks."""
        hidden = self.hidden_size
        heads, dense, shared = (width // ranks for width in (self.heads_width, self.dense_width, self.expert_width))
        label = f"{self.name}, {ranks} ranks"
        return [
            GemmShape(f"{label}, qkv", self.qkv_rows // ranks, hidden, "channel", has_bias=True),
            GemmShape(f"{label}, o", hidden, heads, "channel"),
            GemmShape(f"{label}, dense gate and up", 2 * dense, hidden, "channel"),
            GemmShape(f"{label}, dense down", hidden, dense, "channel"),
            GemmShape(f"{label}, shared gate and up", 2 * shared, hidden, "channel"),
            GemmShape(f"{label}, shared down", hidden, shared, "channel"),
        ]

    def layout(self, first: int, last: int, width_parts: int) -> ExpertLayout:
        """Experts first to last with a part of the width of each."""
        width = self.expert_width // width_parts
        return ExpertLayout(self.num_experts, first, last, self.hidden_size, width, 8, is_tiled=True)

    def layouts(self) -> dict[str, ExpertLayout]:
        """One of eight ranks of both layouts, and a quarter of the experts of one of four and of two."""
        whole, quarter, eighth = (self.num_experts // parts for parts in (1, 4, 8))
        return {
            f"{self.name} tp8": self.layout(0, whole, 8),
            f"{self.name} ep8": self.layout(2 * eighth, 3 * eighth, 1),
            f"{self.name} tp4": self.layout(quarter, 2 * quarter, 4),
            f"{self.name} tp2": self.layout(whole - quarter, whole, 2),
        }


GLM_47 = ModelShape("glm-4.7", 5120, 12288, 1536, 160)
GLM_45_AIR = ModelShape("glm-4.5-air", 4096, 10944, 1408, 128)
MODELS = (GLM_47, GLM_45_AIR)

GEMMS = {
    shape.name: shape
    for shape in (
        GemmShape("qkv", 1792, 5120, "channel", has_bias=True),
        GemmShape("o", 5120, 1536, "channel", margin=4),
        GemmShape("dense gate and up", 3072, 5120, "channel"),
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
RANK_GEMMS = {shape.name: shape for model in MODELS for ranks in RANKS for shape in model.gemms(ranks)}
ROW_COUNT_GEMMS = {
    shape.name: (shape, count)
    for shape, count in (
        (GemmShape("qkv", 1792, 5120, "channel", has_bias=True), MANY_ROWS),
        (GemmShape("o", 5120, 1536, "channel"), MANY_ROWS),
        (GemmShape("shared", 384, 5120, "channel"), MANY_ROWS),
        (GemmShape("tile", 520, 5120, "tile"), MANY_ROWS),
        (GemmShape("BF16", 520, 5120, None, has_bias=True), MANY_ROWS),
        (GemmShape("BF16 qkv", 1792, 5120, None, has_bias=True), ROWS_PAST_ALL_SWITCHES),
        (GemmShape("BF16 o", 5120, 1536, None), ROWS_PAST_ALL_SWITCHES),
        (GemmShape("BF16 shared down", 5120, 192, None), ROWS_PAST_ALL_SWITCHES),
        *(
            (RANK_GEMMS[name], ROWS_PAST_ALL_SWITCHES)
            for name in (
                "glm-4.7, 1 ranks, o",
                "glm-4.7, 2 ranks, shared down",
                "glm-4.5-air, 8 ranks, qkv",
                "glm-4.5-air, 8 ranks, o",
                "glm-4.5-air, 8 ranks, dense down",
                "glm-4.5-air, 1 ranks, shared down",
            )
        ),
    )
}
TILED_LAYOUTS = {name: layout for model in MODELS for name, layout in model.layouts().items()}
EIGHTHS = [name for name in TILED_LAYOUTS if name.endswith("8")]
FALLBACK_LAYOUTS = {
    "tp8 fallback": ExpertLayout(160, 0, 160, 5120, 192, 8, is_tiled=False),
    "odd": ExpertLayout(10, 2, 8, 200, 56, 3, is_tiled=False),
    "one expert": ExpertLayout(32, 31, 32, 160, 16, 8, is_tiled=False),
    "odd tiles": ExpertLayout(12, 0, 12, 300, 144, 4, is_tiled=False, kind="tile"),
    "odd BF16": ExpertLayout(10, 0, 9, 136, 72, 3, is_tiled=False, kind=None),
}
LAYOUTS = TILED_LAYOUTS | FALLBACK_LAYOUTS


def gemm_runs() -> list[tuple[GemmShape, Family, tuple[int, ...]]]:
    """Every GEMM with its families and row counts; of those of ranks the fallback runs only what the others refuse."""
    runs: list[tuple[GemmShape, Family, tuple[int, ...]]] = []
    for shapes, families, counts in ((GEMMS, ALL_FAMILIES, COUNTS), (RANK_GEMMS, TILED, RANK_COUNTS)):
        runs += [(shape, family, counts) for shape in shapes.values() for family in families_of(shape, families)]
    return runs


def families_of(shape: GemmShape, wanted: tuple[Family, ...]) -> tuple[Family, ...]:
    """The wanted families, or the fallback alone where the tiled family refuses the shape."""
    return wanted if shape.is_tiled else ("fallback",)


def expert_runs() -> list[tuple[str, Family, tuple[tuple[int, int], ...]]]:
    """Every layout with every family that takes it and the (tokens, real tokens) to run."""
    runs: list[tuple[str, Family, tuple[tuple[int, int], ...]]] = []
    for name in TILED_LAYOUTS:
        runs += [(name, family, EXPERT_COUNTS if name in EIGHTHS else PART_COUNTS) for family in TILED]
    return runs + [(name, "fallback", EXPERT_COUNTS) for name in FALLBACK_LAYOUTS]


@dataclass(frozen=True)
class ExpectedGemm:
    """A GEMM of the most rows, and what the CPU makes of some of them."""

    case: GemmCase
    chosen: np.ndarray
    rows: FloatArray


@lru_cache(maxsize=1)
def expected_gemm(shape: GemmShape, counts: tuple[int, ...]) -> ExpectedGemm:
    """All rows of a small GEMM, of a large one the last row of every count and a few more."""
    case = shape.case(max(counts))
    few = {count - 1 for count in counts} | set(source(shape.rows).integers(0, max(counts), 4).tolist())
    is_small = shape.rows * shape.cols < EVERY_ROW_LIMIT
    chosen = np.arange(max(counts)) if is_small else np.array(sorted(few))
    with Operations("exact", CPU_THREADS) as operations:
        rows = operations.gemm(GemmCase(case.rows[chosen], case.weight, case.bias))
    return ExpectedGemm(case, chosen, rows)
