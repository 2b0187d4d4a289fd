"""The slice of every tensor that each rank holds.

Query, key, value, gate and up are split by rows, output and down by columns, lm_head by rows of the vocabulary; scales
and biases go with their weight. Norms, the router and the embedding are whole on every rank: a whole embedding (1.55 GB
for GLM-4.7) lets a rank look its tokens up without a collective. A tied lm_head is a view of the embedding's rows.
"""

from collections.abc import Iterator
from typing import NamedTuple

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.layout import ExpertLayout, Part, Role
from glint.checkpoint.quantisation import TILE_SIZE, ScaleKind
from glint.checkpoint.table import TableEntry
from glint.errors import CheckpointError

_QUERY_HEADS = frozenset({Role.QUERY, Role.OUTPUT})
_KV_HEADS = frozenset({Role.KEY, Role.VALUE})
_SWIGLU = frozenset({Role.GATE, Role.UP, Role.DOWN})
_SHARED = frozenset({Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN})
_BY_COLS = frozenset({Role.OUTPUT, Role.DOWN, Role.SHARED_DOWN})
_OTHER_LAYOUT: dict[ExpertLayout, ExpertLayout] = {"tp": "ep", "ep": "tp"}


class Slice(NamedTuple):
    """A rectangle of a tensor, in the tensor's own rows and columns."""

    row_first: int
    row_count: int
    col_first: int
    col_count: int

    @property
    def num_elements(self) -> int:
        """Elements of the tensor that lie in the slice."""
        return self.row_count * self.col_count


class _Split(NamedTuple):
    """A division among ranks: `units` units of `unit_size` rows or columns each.

    `field` is what a user knows the units by, `tensors` which tensors are cut so.
    """

    field: str
    tensors: str
    units: int
    unit_size: int = 1
    can_duplicate: bool = False
    is_tiled: bool = False

    def units_of(self, rank: int, tp: int) -> range:
        """The units of one rank; the same unit on several ranks where there are more ranks than units."""
        first = rank * self.units // tp
        return range(first, first + max(1, self.units // tp))

    def refusal(self, tp: int) -> str | None:
        """Why this cannot be split over so many ranks, None where it can."""
        if self.units % tp and not (self.can_duplicate and tp % self.units == 0):
            if self.can_duplicate:
                return f"{self.field} {self.units} can neither be split over {tp} ranks nor be duplicated evenly"
            return f"{self.field} {self.units} cannot be split over {tp} ranks"
        share = max(1, self.units // tp) * self.unit_size
        if self.is_tiled and min(self.units, tp) > 1 and share % TILE_SIZE:
            return (
                f"{self.tensors}: {self.units * self.unit_size} over {tp} ranks makes slices of {share}, which "
                f"cut through the tiles of {TILE_SIZE} that share a scale"
            )
        return None


def slice_of(entry: TableEntry, config: ModelConfig, rank: int, tp: int, expert_layout: ExpertLayout) -> Slice | None:
    """Give the part of a tensor that a rank holds, None where it holds nothing of it.

    Ranks hold equally much: as many elements of a tensor that is split, as many experts where those stay whole. Raises
    CheckpointError where this tensor cannot be split so.
    """
    _check_rank(rank, tp)
    whole = Slice(0, entry.rows, 0, entry.cols)
    split = _split_of(entry.role, entry.expert is not None, config, expert_layout)
    if split is None:
        return whole
    units = _deal(split, rank, tp)
    if entry.expert is not None and expert_layout == "ep":
        return whole if entry.expert in units else None
    first, count = units.start * split.unit_size, len(units) * split.unit_size
    if entry.part is Part.SCALE:
        if config.weight_scale_kind is ScaleKind.TENSOR:
            return whole
        if config.weight_scale_kind is ScaleKind.TILE:
            first, count = first // TILE_SIZE, -(-count // TILE_SIZE)
        elif entry.role in _BY_COLS:
            return whole
    if entry.role in _BY_COLS:
        return Slice(0, entry.rows, first, count)
    return Slice(first, count, 0, entry.cols)


def kv_heads_of(config: ModelConfig, rank: int, tp: int) -> range:
    """Give the key/value heads whose keys and values a rank keeps; raises CheckpointError where they do not split."""
    _check_rank(rank, tp)
    return _deal(_kv_split(config), rank, tp)


def find_split_problems(config: ModelConfig, tp: int, expert_layout: ExpertLayout) -> tuple[str, ...]:
    """Say everything that keeps a model from being split over so many ranks, with the way out; nothing where it can."""
    if tp < 1:
        return (f"a model cannot be split over {tp} ranks; choose --tp 1 or more",)
    problems = [
        f"{problem}; choose another --tp"
        for split in _common_splits(config)
        if (problem := split.refusal(tp)) is not None
    ]
    if config.num_dense_layers < config.num_layers:
        problem = _routed_split(config, expert_layout).refusal(tp)
        if problem is not None:
            other = _OTHER_LAYOUT[expert_layout]
            can_other = _routed_split(config, other).refusal(tp) is None
            way = f" or --expert-layout {other}" if can_other else ""
            problems.append(f"{problem}; choose another --tp{way}")
    return tuple(problems)


def _check_rank(rank: int, tp: int) -> None:
    if not 0 <= rank < tp:
        raise CheckpointError(f"rank {rank} is not one of {tp} ranks, which count from 0; name one of them")


def _deal(split: _Split, rank: int, tp: int) -> range:
    problem = split.refusal(tp)
    if problem is not None:
        raise CheckpointError(f"{problem}; choose another --tp or --expert-layout")
    return split.units_of(rank, tp)


def _split_of(role: Role, is_routed: bool, config: ModelConfig, expert_layout: ExpertLayout) -> _Split | None:
    if role in _SWIGLU:
        return _routed_split(config, expert_layout) if is_routed else _dense_split(config)
    if role in _QUERY_HEADS:
        return _query_split(config)
    if role in _KV_HEADS:
        return _kv_split(config)
    if role in _SHARED:
        return _shared_split(config)
    if role is Role.LM_HEAD:
        return _vocabulary_split(config)
    return None


def _common_splits(config: ModelConfig) -> Iterator[_Split]:
    yield _query_split(config)
    yield _kv_split(config)
    if config.num_dense_layers:
        yield _dense_split(config)
    if config.num_dense_layers < config.num_layers:
        yield _shared_split(config)
    yield _vocabulary_split(config)


def _is_tiled(config: ModelConfig) -> bool:
    return config.weight_scale_kind is ScaleKind.TILE


def _query_split(config: ModelConfig) -> _Split:
    tensors = "query rows and output columns"
    return _Split("num_attention_heads", tensors, config.num_heads, config.head_dim, is_tiled=_is_tiled(config))


def _kv_split(config: ModelConfig) -> _Split:
    return _Split(
        "num_key_value_heads",
        "key and value rows",
        config.num_kv_heads,
        config.head_dim,
        can_duplicate=True,
        is_tiled=_is_tiled(config),
    )


def _dense_split(config: ModelConfig) -> _Split:
    tensors = "gate and up rows and down columns of the dense layers"
    return _Split("intermediate_size", tensors, config.dense_width, is_tiled=_is_tiled(config))


def _shared_split(config: ModelConfig) -> _Split:
    tensors = "gate and up rows and down columns of the shared expert"
    return _Split("shared expert width", tensors, config.shared_width, is_tiled=_is_tiled(config))


def _vocabulary_split(config: ModelConfig) -> _Split:
    return _Split("vocab_size", "lm_head rows", config.vocab_size)


def _routed_split(config: ModelConfig, expert_layout: ExpertLayout) -> _Split:
    if expert_layout == "ep":
        return _Split("n_routed_experts", "routed experts", config.num_experts)
    tensors = "gate and up rows and down columns of the routed experts"
    return _Split("moe_intermediate_size", tensors, config.expert_width, is_tiled=_is_tiled(config))
