"""The collectives and bytes that one of several ranks sends in a step, counted from the shapes."""

from dataclasses import dataclass

from glint.bench.rank_shapes import FLOAT_BYTES, RankShape
from glint.checkpoint.quantisation import ScaleKind

SAMPLE_RESULT_BYTES = 176
REPLICATED_ROWS = 64
ONE_STEP_ROWS = 16
ONE_STEP_RANKS = 2
FP8_BYTES = 1
BF16_BYTES = 2


@dataclass(frozen=True)
class CollectiveCount:
    """Collectives that one rank takes part in during a step, and the bytes that it sends in them."""

    collectives: int
    bytes_sent: int


def count_collectives(shape: RankShape, tokens: int, sampled: int) -> CollectiveCount:
    """Count a step of `tokens` rows of which `sampled` are sampled, with the collectives that the CUDA library chooses.

    Up to 64 rows are replicated: two all-reduces of FP32 parts per layer, up to 16 rows or between two ranks all of
    every part, otherwise a share of the rows from every part and then the sums of the other shares. More are
    sharded: per layer two all-to-alls of FP32 parts and two all-gathers of quantised rows with their scales, one of
    the chosen experts with their weights, and at the end one of the normed rows. Either way the logits are gathered
    and the results broadcast by the first rank, of which this counts the mean over ranks.
    """
    if shape.tp == 1:
        return CollectiveCount(0, 0)
    layers = (_replicated if tokens <= REPLICATED_ROWS else _sharded)(shape, tokens)
    logits = sampled * shape.model.vocab_size * FLOAT_BYTES
    results = sampled * SAMPLE_RESULT_BYTES * (shape.tp - 1)
    return CollectiveCount(layers.collectives + 2, layers.bytes_sent + (logits * (shape.tp - 1) + results) // shape.tp)


def _replicated(shape: RankShape, tokens: int) -> CollectiveCount:
    collectives = 2 * shape.model.num_layers
    takes_one_step = tokens <= ONE_STEP_ROWS or shape.tp <= ONE_STEP_RANKS
    rows = tokens if takes_one_step else 2 * -(-tokens // shape.tp)
    return CollectiveCount(collectives, collectives * (shape.tp - 1) * rows * shape.model.hidden_size * FLOAT_BYTES)


def _sharded(shape: RankShape, tokens: int) -> CollectiveCount:
    model = shape.model
    is_fp8 = model.weight_scale_kind is not ScaleKind.NONE
    rows = -(-tokens // shape.tp) * (shape.tp - 1)
    part = model.hidden_size * FLOAT_BYTES
    operand = model.hidden_size * FP8_BYTES + FLOAT_BYTES if is_fp8 else model.hidden_size * BF16_BYTES
    choice = 2 * model.experts_per_token * FLOAT_BYTES
    collectives = model.num_layers * 4 + shape.num_moe_layers + 1
    row_bytes = model.num_layers * 2 * (part + operand) + shape.num_moe_layers * choice + part
    return CollectiveCount(collectives, rows * row_bytes)


def projected_decode_ms(shape: RankShape, step_ms: float, batch: int, all_reduce_us: float) -> float:
    """A decode step of all ranks together: the measured step of one, and a stated time for every collective."""
    return step_ms + count_collectives(shape, batch, batch).collectives * all_reduce_us * 1e-3


def projected_prefill_ms(shape: RankShape, step_ms: float, tokens: int, collective_gbs: float) -> float:
    """A prefill step of all ranks together: the measured step of one, and its bytes at a stated rate."""
    return step_ms + count_collectives(shape, tokens, 1).bytes_sent / (collective_gbs * 1e6)
