"""How much memory a rank needs for the weights and the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.layout import Part, Role
from glint.checkpoint.quantisation import TILE_SIZE, ScaleKind
from glint.checkpoint.table import TableEntry
from glint.errors import CheckpointError

ExpertLayout = Literal["tp", "ep"]
BF16_BYTES = 2

_VOCABULARY = {Role.EMBEDDING: "embedding", Role.LM_HEAD: "lm_head"}
_ATTENTION = frozenset({Role.QUERY, Role.KEY, Role.VALUE, Role.OUTPUT})
_KEY_VALUE = frozenset({Role.KEY, Role.VALUE})
_SHARED = frozenset({Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN})
_SPLIT_BY_COLS = frozenset({Role.OUTPUT, Role.DOWN, Role.SHARED_DOWN})
_DENSE_OR_ROUTED = frozenset({Role.GATE, Role.UP, Role.DOWN})


@dataclass(frozen=True)
class MemoryPlan:
    """What one rank holds.

    `weight_bytes` is the sum over `parts`; with problems the shares are rounded up. `kv_bytes_per_token` is for BF16
    keys and values of all main layers.
    """

    num_ranks: int
    expert_layout: ExpertLayout
    parts: tuple[tuple[str, int], ...]
    weight_bytes: int
    kv_heads: int
    kv_bytes_per_token: int
    problems: tuple[str, ...]


def plan_memory(
    config: ModelConfig, tensors: Sequence[TableEntry], num_ranks: int, expert_layout: ExpertLayout
) -> MemoryPlan:
    """Plan the memory of one of `num_ranks` equal ranks.

    Query, key, value, gate and up are split by rows, output and down by columns, the vocabulary by rows. Experts are
    sliced ("tp") or whole ("ep"). Key and value heads are duplicated when there are more ranks than heads. Norms and
    the router are on every rank. Raises CheckpointError when `num_ranks` is not positive.
    """
    if num_ranks < 1:
        raise CheckpointError(f"a plan for {num_ranks} ranks cannot be made; choose --tp 1 or more")
    parts: dict[str, int] = {}
    embedding_offsets = {(entry.file_index, entry.file_offset) for entry in tensors if entry.role is Role.EMBEDDING}
    for entry in tensors:
        if entry.role is Role.LM_HEAD and (entry.file_index, entry.file_offset) in embedding_offsets:
            continue
        part = _part_name(entry)
        parts[part] = parts.get(part, 0) + _rank_bytes(entry, config, num_ranks, expert_layout)
    kv_heads = _ceil_share(config.num_kv_heads, num_ranks)
    return MemoryPlan(
        num_ranks=num_ranks,
        expert_layout=expert_layout,
        parts=tuple(parts.items()),
        weight_bytes=sum(parts.values()),
        kv_heads=kv_heads,
        kv_bytes_per_token=2 * kv_heads * config.head_dim * config.num_layers * BF16_BYTES,
        problems=tuple(_split_problems(config, num_ranks, expert_layout)),
    )


def _ceil_share(size: int, shares: int) -> int:
    return -(-size // shares)


def _part_name(entry: TableEntry) -> str:
    if entry.role in _VOCABULARY:
        return _VOCABULARY[entry.role]
    if entry.role in _ATTENTION:
        return "attention"
    if entry.role in _SHARED:
        return "shared experts"
    if entry.role is Role.ROUTER:
        return "router"
    if entry.role in _DENSE_OR_ROUTED:
        return "dense layers" if entry.expert is None else "routed experts"
    return "norms"


def _rank_bytes(entry: TableEntry, config: ModelConfig, num_ranks: int, expert_layout: ExpertLayout) -> int:
    if entry.expert is not None and expert_layout == "ep":
        return entry.byte_count if entry.expert < _ceil_share(config.num_experts, num_ranks) else 0
    size = _split_size(entry, config)
    if size is None:
        return entry.byte_count
    ranks = min(num_ranks, config.num_kv_heads) if entry.role in _KEY_VALUE else num_ranks
    length = entry.cols if entry.role in _SPLIT_BY_COLS else entry.rows
    if entry.part is Part.SCALE and config.weight_scale_kind is ScaleKind.TILE:
        kept = _tiles_of_share(size, ranks)
    else:
        kept = _ceil_share(size, ranks) if length == size else length
    return entry.byte_count // length * kept


def _split_size(entry: TableEntry, config: ModelConfig) -> int | None:
    if entry.role in _VOCABULARY:
        return config.vocab_size
    if entry.role in _KEY_VALUE:
        return config.num_kv_heads * config.head_dim
    if entry.role in _ATTENTION:
        return config.num_heads * config.head_dim
    if entry.role in _SHARED:
        return config.shared_width
    if entry.role in _DENSE_OR_ROUTED:
        return config.dense_width if entry.expert is None else config.expert_width
    return None


def _tiles_of_share(size: int, ranks: int) -> int:
    share = _ceil_share(size, ranks)
    starts = range(0, size, share)
    return max(_ceil_share(min(start + share, size), TILE_SIZE) - start // TILE_SIZE for start in starts)


def _split_problems(config: ModelConfig, num_ranks: int, expert_layout: ExpertLayout) -> list[str]:
    sizes = {
        "num_attention_heads": config.num_heads,
        "vocab_size": config.vocab_size,
        "shared expert width": config.shared_width,
    }
    if config.num_dense_layers:
        sizes["intermediate_size"] = config.dense_width
    if expert_layout == "tp":
        sizes["moe_intermediate_size"] = config.expert_width
    else:
        sizes["n_routed_experts"] = config.num_experts
    found = [
        f"{name} {size} cannot be split over {num_ranks} ranks; choose another --tp"
        for name, size in sizes.items()
        if size % num_ranks
    ]
    kv_heads = config.num_kv_heads
    if kv_heads % num_ranks and num_ranks % kv_heads:
        found.append(
            f"num_key_value_heads {kv_heads} can neither be split over {num_ranks} ranks nor be duplicated evenly; "
            "choose another --tp"
        )
    return found
