"""What is recorded of the reference, and over which tokens."""

from tests.reference.shapes import FAMILIES, WEIGHTS, Family, Weights

Case = tuple[Family, Weights]

ANSWER_TOKENS = 32
MODEL_CASES: list[Case] = [(family, weights) for family in FAMILIES for weights in WEIGHTS]
BREAK_CASES: dict[str, Case] = {
    "rotary_halves": ("glm47", "fp8_channel"),
    "bias_in_weights": ("glm47", "bf16"),
    "scaling_twice": ("tied", "bf16"),
    "shared_dropped": ("air", "fp8_tensor"),
    "qk_norm_skipped": ("glm47", "bf16"),
    "scale_row_shifted": ("air", "fp8_block"),
    "groups_ignored": ("air", "fp8_group"),
}

QUICK_CASES: list[Case] = [*BREAK_CASES.values(), ("glm47", "fp8_block"), ("tied", "fp8_tensor")]

ROUNDED_CACHE = "rounded_cache"
ROUNDED_CACHE_TOKENS = 24
ROUNDED_CACHE_CASES: list[Case] = [("glm47", "bf16"), ("glm47", "fp8_channel"), ("air", "fp8_block")]

DIVERGENCE_CASES: list[Case] = [(family, weights) for family in ("glm47", "air") for weights in WEIGHTS[1:]]
QUICK_DIVERGENCE_CASES: list[Case] = [("glm47", "fp8_block"), ("air", "fp8_channel")]
DIVERGENCE_TOKEN_LIMIT = 950
RANKS = "ranks"

SAMPLE = "sample"
SAMPLE_TOKENS = 16
SAMPLE_PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "To make a good cup of tea, first",
    "Water boils when",
    "def add(a, b):\n    return",
)

KEPT_SEEDS = 6
KEPT_VOCAB_SIZE = 2003
KEPT_PENALTY = 1.4
