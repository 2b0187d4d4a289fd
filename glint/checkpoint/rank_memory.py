"""The memory that one rank needs for weights and KV cache, by the placement of the tensors."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.layout import Dtype, ExpertLayout, Part, Role
from glint.checkpoint.placement import Slice, find_split_problems, kv_heads_of, slice_of
from glint.checkpoint.table import TableEntry
from glint.errors import CheckpointError

BF16_BYTES = 2

_KIND_NAMES = {
    Role.EMBEDDING: "embedding",
    Role.LM_HEAD: "lm_head",
    Role.FINAL_NORM: "norms",
    Role.INPUT_NORM: "norms",
    Role.POST_ATTENTION_NORM: "norms",
    Role.QUERY: "query",
    Role.KEY: "key, value",
    Role.VALUE: "key, value",
    Role.OUTPUT: "output",
    Role.QUERY_NORM: "head norms",
    Role.KEY_NORM: "head norms",
    Role.GATE: "gate, up",
    Role.UP: "gate, up",
    Role.DOWN: "down",
    Role.ROUTER: "router",
    Role.SHARED_GATE: "shared gate, up",
    Role.SHARED_UP: "shared gate, up",
    Role.SHARED_DOWN: "shared down",
    Role.EMBEDDING_NORM: "norms",
    Role.HIDDEN_NORM: "norms",
    Role.EH_PROJ: "eh_proj",
}
_SWIGLU = frozenset({Role.GATE, Role.UP, Role.DOWN})
_PART_NAMES = {Part.WEIGHT: "", Part.SCALE: " scale", Part.BIAS: " bias"}


@dataclass(frozen=True)
class TensorKind:
    """Tensors of one purpose, shape and type, and what one rank holds of them.

    `count` tensors are in the checkpoint and `rank_count` of them on a rank, each as large as `share`, which is None
    where there are none. A kind that `is_view` takes no bytes: it shares those of the embedding.
    """

    name: str
    dtype: Dtype
    rows: int
    cols: int
    is_view: bool
    count: int
    rank_count: int
    share: Slice | None
    rank_bytes: int


@dataclass(frozen=True)
class RankMemory:
    """The memory of each of `tp` ranks; all hold equally much.

    `weight_bytes` is the sum over `kinds`, as stored in the files. Each rank keeps the keys and values of `kv_heads`
    heads, and each head is kept by `kv_copies` ranks; `kv_bytes_per_token` is for BF16 and all main layers.
    """

    tp: int
    expert_layout: ExpertLayout
    kinds: tuple[TensorKind, ...]
    weight_bytes: int
    kv_heads: int
    kv_copies: int
    kv_bytes_per_token: int


def measure_rank(
    config: ModelConfig, tensors: Sequence[TableEntry], tp: int, expert_layout: ExpertLayout
) -> RankMemory:
    """Add up the memory of one of `tp` equal ranks.

    Raises CheckpointError with everything that keeps the model from being split so.
    """
    problems = find_split_problems(config, tp, expert_layout)
    if problems:
        raise CheckpointError(*problems)
    kinds = tuple(
        _sum_kind(name, is_view, entries, [slice_of(entry, config, 0, tp, expert_layout) for entry in entries])
        for (name, is_view, _, _, _), entries in _sort_by_kind(tensors).items()
    )
    kv_heads = len(kv_heads_of(config, 0, tp))
    return RankMemory(
        tp=tp,
        expert_layout=expert_layout,
        kinds=kinds,
        weight_bytes=sum(kind.rank_bytes for kind in kinds),
        kv_heads=kv_heads,
        kv_copies=kv_heads * tp // config.num_kv_heads,
        kv_bytes_per_token=2 * kv_heads * config.head_dim * config.num_layers * BF16_BYTES,
    )


def _sort_by_kind(tensors: Sequence[TableEntry]) -> dict[tuple[str, bool, Dtype, int, int], list[TableEntry]]:
    embedding_places = {(entry.file_index, entry.file_offset) for entry in tensors if entry.role is Role.EMBEDDING}
    sorted_entries: dict[tuple[str, bool, Dtype, int, int], list[TableEntry]] = defaultdict(list)
    for entry in tensors:
        is_view = entry.role is Role.LM_HEAD and (entry.file_index, entry.file_offset) in embedding_places
        sorted_entries[_kind_name(entry), is_view, entry.dtype, entry.rows, entry.cols].append(entry)
    return sorted_entries


def _kind_name(entry: TableEntry) -> str:
    name = _KIND_NAMES[entry.role] + _PART_NAMES[entry.part]
    if entry.role in _SWIGLU:
        return f"dense {name}" if entry.expert is None else f"expert {name}"
    return name


def _sum_kind(name: str, is_view: bool, entries: Sequence[TableEntry], slices: Sequence[Slice | None]) -> TensorKind:
    first = entries[0]
    held = [piece for piece in slices if piece is not None]
    element_bytes = first.byte_count // (first.rows * first.cols)
    return TensorKind(
        name=name,
        dtype=first.dtype,
        rows=first.rows,
        cols=first.cols,
        is_view=is_view,
        count=len(entries),
        rank_count=len(held),
        share=held[0] if held else None,
        rank_bytes=0 if is_view else element_bytes * sum(piece.num_elements for piece in held),
    )
