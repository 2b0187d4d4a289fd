"""The placement of tensors on ranks: random models, really cut up with NumPy and put together again."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig

from glint.checkpoint.config import ModelConfig, parse_config
from glint.checkpoint.layout import Dtype, Part, Role, expected_tensors
from glint.checkpoint.placement import ExpertLayout, Slice, find_split_problems, kv_heads_of, slice_of
from glint.checkpoint.quantisation import ScaleKind
from glint.checkpoint.rank_memory import measure_rank
from glint.checkpoint.table import TableEntry
from glint.errors import CheckpointError
from tests.pure.checkpoint_files import GLM_47, SMALL, quantization

Array = npt.NDArray[Any]
NUMPY_TYPES = {Dtype.F32: np.float32, Dtype.BF16: np.uint16, Dtype.F8_E4M3: np.uint8}
LAYOUTS: tuple[ExpertLayout, ...] = ("tp", "ep")
BY_ROWS = {Role.QUERY, Role.KEY, Role.VALUE, Role.GATE, Role.UP, Role.SHARED_GATE, Role.SHARED_UP, Role.LM_HEAD}
BY_COLS = {Role.OUTPUT, Role.DOWN, Role.SHARED_DOWN}
AXES = dict.fromkeys(BY_ROWS, 0) | dict.fromkeys(BY_COLS, 1)
MANY = settings(suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Case:
    """A model and the ranks that it is for."""

    config: ModelConfig
    num_ranks: int
    layout: ExpertLayout

    def slice_of(self, entry: TableEntry, rank: int) -> Slice | None:
        """The placement under test."""
        return slice_of(entry, self.config, rank, self.num_ranks, self.layout)


def make_config(strategy: str | None, changes: dict[str, int]) -> ModelConfig:
    """The small model with other sizes."""
    document = SMALL | {"num_experts_per_tok": 1} | changes
    return parse_config(document if strategy is None else document | {"quantization_config": quantization(strategy)})


def make_entries(config: ModelConfig) -> list[TableEntry]:
    """The table of a model of this config, in a file that does not exist; a tied lm_head lies on the embedding."""
    entries: list[TableEntry] = []
    position = 0
    for tensor in expected_tensors(config):
        dtype = tensor.dtypes[0]
        byte_count = tensor.rows * tensor.cols * np.dtype(NUMPY_TYPES[dtype]).itemsize
        sizes = (tensor.rows, tensor.cols, 0, position, byte_count)
        entries.append(TableEntry(tensor.role, tensor.part, tensor.layer, tensor.expert, dtype, *sizes))
        position += byte_count
    if config.tied_embeddings:
        entries.append(entries[0]._replace(role=Role.LM_HEAD))
    return entries


@st.composite
def fitting_cases(draw: st.DrawFn, strategies: tuple[str | None, ...] = (None, "channel", "tensor", "block")) -> Case:
    """Any model that splits evenly over the ranks drawn, key/value heads that must be duplicated included."""
    strategy = draw(st.sampled_from(strategies))
    layout = draw(st.sampled_from(LAYOUTS))
    ranks = draw(st.integers(1, 4 if strategy == "block" else 8))
    few = st.integers(1, 3)
    kv_heads = draw(st.sampled_from([heads for heads in range(1, ranks) if ranks % heads == 0] + [ranks, 2 * ranks]))
    unit = 128 if strategy == "block" and ranks > 1 else draw(few)
    whole_width = draw(st.integers(1, 200))
    changes = {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "hidden_size": draw(st.integers(1, 200)),
        "head_dim": 128 if unit == 128 else 4 * draw(few),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": int(np.lcm(kv_heads, ranks)) * draw(few),
        "vocab_size": ranks * draw(st.integers(4, 20)),
        "intermediate_size": ranks * unit * draw(few),
        "n_routed_experts": (ranks if layout == "ep" else 1) * draw(st.integers(2, 3)),
        "moe_intermediate_size": ranks * unit * draw(few),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if ranks == 1:
        changes["intermediate_size"] = changes["moe_intermediate_size"] = whole_width
    return Case(make_config(strategy, changes), ranks, layout)


def fill(entry: TableEntry) -> Array:
    """An array of the tensor's shape and type with many different values."""
    values = (np.arange(entry.rows * entry.cols) * 7 + entry.role + 1) % 251
    return values.astype(NUMPY_TYPES[entry.dtype]).reshape(entry.rows, entry.cols)


def cut(array: Array, piece: Slice) -> Array:
    """The slice of an array; every row and column of the slice must be there."""
    part = array[
        piece.row_first : piece.row_first + piece.row_count, piece.col_first : piece.col_first + piece.col_count
    ]
    assert part.shape == (piece.row_count, piece.col_count) and part.size
    return part


def numpy_pieces(array: Array, entry: TableEntry, case: Case) -> list[Array | None]:
    """What every rank must hold of a weight or bias, by NumPy's own splitting."""
    ranks = case.num_ranks
    if entry.expert is not None and case.layout == "ep":
        owners = np.repeat(np.arange(ranks), case.config.num_experts // ranks)
        return [array if owners[entry.expert] == rank else None for rank in range(ranks)]
    if entry.role not in AXES:
        return [array] * ranks
    if entry.role in {Role.KEY, Role.VALUE}:
        holders = min(ranks, case.config.num_kv_heads)
        return [piece for piece in np.split(array, holders) for _ in range(ranks // holders)]
    return list(np.split(array, ranks, axis=AXES[entry.role]))


def dequantise(weight: Array, scale: Array, kind: ScaleKind) -> Array:
    """Weight times scale, element by element."""
    if kind is ScaleKind.TILE:
        scale = np.kron(scale, np.ones((128, 128), np.float32))[: weight.shape[0], : weight.shape[1]]
    return weight * np.broadcast_to(scale, weight.shape)


def same(left: Array | None, right: Array | None) -> bool:
    """Whether both are absent or equal in shape and values."""
    return left is right if left is None or right is None else np.array_equal(left, right)


@MANY
@given(fitting_cases())
def test_every_rank_holds_what_numpy_cuts_out(case: Case) -> None:
    assert not find_split_problems(case.config, case.num_ranks, case.layout)
    for entry in make_entries(case.config):
        if entry.part is Part.SCALE:
            continue
        array = fill(entry)
        for rank, expected in enumerate(numpy_pieces(array, entry, case)):
            piece = case.slice_of(entry, rank)
            assert same(None if piece is None else cut(array, piece), expected), (entry, rank)


@MANY
@given(fitting_cases(("channel", "tensor", "block")))
def test_a_scale_goes_with_its_weight(case: Case) -> None:
    entries = {(entry.role, entry.layer, entry.expert, entry.part): entry for entry in make_entries(case.config)}
    kind = case.config.weight_scale_kind
    for (role, layer, expert, part), entry in entries.items():
        if part is not Part.SCALE:
            continue
        weight_entry = entries[role, layer, expert, Part.WEIGHT]
        weight, scale = fill(weight_entry).astype(np.float32), fill(entry)
        whole = dequantise(weight, scale, kind)
        for rank, expected in enumerate(numpy_pieces(whole, weight_entry, case)):
            weight_piece, scale_piece = case.slice_of(weight_entry, rank), case.slice_of(entry, rank)
            assert (weight_piece is None) == (scale_piece is None) == (expected is None)
            if weight_piece is not None and scale_piece is not None:
                assert same(dequantise(cut(weight, weight_piece), cut(scale, scale_piece), kind), expected)


def copies_of(entry: TableEntry, case: Case) -> int:
    """On how many ranks each element of a tensor must be."""
    kind = case.config.weight_scale_kind
    if entry.expert is not None and case.layout == "ep":
        return 1
    is_common_scale = kind is ScaleKind.TENSOR or (kind is ScaleKind.CHANNEL and entry.role in BY_COLS)
    if entry.role not in AXES or (entry.part is Part.SCALE and is_common_scale):
        return case.num_ranks
    return max(1, case.num_ranks // case.config.num_kv_heads) if entry.role in {Role.KEY, Role.VALUE} else 1


@MANY
@given(fitting_cases())
def test_the_ranks_together_cover_every_tensor_and_the_bytes_add_up(case: Case) -> None:
    entries = make_entries(case.config)
    held = [0] * case.num_ranks
    for entry in entries:
        array = fill(entry)
        times_held = np.zeros(array.shape, int)
        for rank in range(case.num_ranks):
            piece = case.slice_of(entry, rank)
            if piece is not None:
                times_held_here = cut(times_held, piece)
                times_held_here += 1
                is_view = entry.role is Role.LM_HEAD and case.config.tied_embeddings
                held[rank] += 0 if is_view else cut(array, piece).nbytes
        assert np.all(times_held == copies_of(entry, case)), entry
    plan = measure_rank(case.config, entries, case.num_ranks, case.layout)
    assert held == [plan.weight_bytes] * case.num_ranks
    assert sum(kind.count for kind in plan.kinds) == len(entries)


@MANY
@given(fitting_cases())
def test_a_rank_has_the_key_and_value_heads_of_its_query_heads(case: Case) -> None:
    config = case.config
    entries = {entry.role: entry for entry in make_entries(config) if entry.layer == 0 and entry.part is Part.WEIGHT}
    heads_per_kv_head = config.num_heads // config.num_kv_heads
    for rank in range(case.num_ranks):
        query, key = case.slice_of(entries[Role.QUERY], rank), case.slice_of(entries[Role.KEY], rank)
        assert query is not None and key is not None
        rows = range(query.row_first, query.row_first + query.row_count)
        used = {row // config.head_dim // heads_per_kv_head for row in rows}
        kept = kv_heads_of(config, rank, case.num_ranks)
        assert (
            used == set(kept) == {row // config.head_dim for row in range(key.row_first, key.row_first + key.row_count)}
        )


def tensor_axes() -> Iterator[tuple[str, int]]:
    """By tensor name, the axis that transformers splits: its column-wise is by rows of the stored matrix."""
    for name, style in Glm4MoeConfig.base_model_tp_plan.items():
        if style in {"colwise", "packed_colwise", "rowwise"}:
            yield name, 1 if style == "rowwise" else 0


def test_the_axes_are_those_of_transformers() -> None:
    config = make_config(None, {})
    axes = dict(tensor_axes())
    found: dict[str, int | None] = {}
    for tensor, entry in zip(expected_tensors(config), make_entries(config), strict=True):
        if tensor.part is Part.WEIGHT and tensor.cols > 1 and tensor.layer is not None:
            name = re.sub(r"experts\.\d+\.", "experts.", tensor.name).removeprefix("model.").removesuffix(".weight")
            if tensor.expert is not None:
                name = re.sub("gate_proj|up_proj", "gate_up_proj", name)
            piece = slice_of(entry, config, 1, 2, "tp")
            assert piece is not None
            axis = 0 if piece.row_count < entry.rows else 1 if piece.col_count < entry.cols else None
            key = re.sub(r"layers\.\d+", "layers.*", name)
            assert found.setdefault(key, axis) == axis
    assert found.pop("layers.*.mlp.gate") is None
    assert found == axes


@st.composite
def any_cases(draw: st.DrawFn) -> Case:
    """Small models of any sizes for any number of ranks; most do not split."""
    kv_heads = draw(st.integers(1, 4))
    changes = {
        "head_dim": draw(st.sampled_from([4, 64, 128])),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.integers(1, 4)),
        "vocab_size": draw(st.integers(4, 12)),
        "intermediate_size": draw(st.sampled_from([6, 12, 128, 192, 256, 384])),
        "n_routed_experts": draw(st.integers(2, 6)),
        "moe_intermediate_size": draw(st.sampled_from([6, 12, 128, 192, 256, 384])),
        "first_k_dense_replace": draw(st.integers(0, 3)),
    }
    strategy = draw(st.sampled_from([None, "channel", "block"]))
    return Case(make_config(strategy, changes), draw(st.integers(1, 6)), draw(st.sampled_from(LAYOUTS)))


def splits_by_numpy(entry: TableEntry, case: Case) -> bool:
    """Whether heads, vocabulary, widths or experts fall into equal parts, and tiles stay whole."""
    config, ranks = case.config, case.num_ranks
    if entry.role not in AXES or entry.part is Part.SCALE:
        return True
    size = (entry.rows, entry.cols)[AXES[entry.role]]
    unit = config.head_dim if entry.role in {Role.QUERY, Role.KEY, Role.VALUE, Role.OUTPUT} else 1
    starts = np.arange(0, size, unit)
    if entry.expert is not None and case.layout == "ep":
        starts = np.arange(config.num_experts)
    if entry.role in {Role.KEY, Role.VALUE} and ranks % config.num_kv_heads == 0:
        starts = np.repeat(starts, ranks // config.num_kv_heads)
    try:
        firsts = [int(piece[0]) for piece in np.split(starts, ranks)]
    except ValueError:
        return False
    has_tiles = config.weight_scale_kind is ScaleKind.TILE and entry.dtype is Dtype.F8_E4M3
    is_whole = entry.expert is not None and case.layout == "ep"
    return is_whole or not has_tiles or all(first % 128 == 0 for first in firsts)


@settings(MANY)
@given(any_cases())
def test_what_does_not_split_is_refused_and_nothing_else(case: Case) -> None:
    refused = 0
    for entry in make_entries(case.config):
        try:
            case.slice_of(entry, case.num_ranks - 1)
            is_placed = True
        except CheckpointError:
            is_placed = False
            refused += 1
        if entry.part is Part.WEIGHT:
            assert is_placed == splits_by_numpy(entry, case), entry
    assert bool(find_split_problems(case.config, case.num_ranks, case.layout)) == (refused > 0)


def test_all_uneven_sizes_are_named_at_once_with_the_way_out() -> None:
    config = make_config(None, {})
    problems = find_split_problems(config, 7, "tp")
    assert problems == (
        "num_attention_heads 8 cannot be split over 7 ranks; choose another --tp",
        "num_key_value_heads 2 can neither be split over 7 ranks nor be duplicated evenly; choose another --tp",
        "intermediate_size 320 cannot be split over 7 ranks; choose another --tp",
        "shared expert width 160 cannot be split over 7 ranks; choose another --tp",
        "vocab_size 96 cannot be split over 7 ranks; choose another --tp",
        "moe_intermediate_size 160 cannot be split over 7 ranks; choose another --tp",
    )
    assert find_split_problems(config, 8, "ep") == (
        "n_routed_experts 4 cannot be split over 8 ranks; choose another --tp or --expert-layout tp",
    )
    assert "0 ranks; choose --tp 1 or more" in find_split_problems(config, 0, "tp")[0]
    with pytest.raises(CheckpointError, match="num_key_value_heads 2 can neither be split over 3 ranks"):
        kv_heads_of(config, 0, 3)


def test_a_model_without_dense_layers_or_experts_is_not_asked_for_their_sizes() -> None:
    changes = {"first_k_dense_replace": 0, "intermediate_size": 5}
    assert find_split_problems(make_config(None, changes), 4, "tp") == ()
    assert len(find_split_problems(make_config(None, changes | {"first_k_dense_replace": 1}), 4, "tp")) == 1
    changes = {"first_k_dense_replace": 3, "moe_intermediate_size": 5, "n_routed_experts": 3}
    assert find_split_problems(make_config(None, changes), 4, "tp") == ()
    assert len(find_split_problems(make_config(None, changes | {"first_k_dense_replace": 2}), 4, "tp")) == 2


def test_slices_that_cut_tiles_of_glm_47_are_refused_by_name() -> None:
    config = parse_config(GLM_47 | {"quantization_config": quantization("block")})
    shared = (
        "gate and up rows and down columns of the shared expert: 1536 over 8 ranks makes slices of 192, which cut "
        "through the tiles of 128 that share a scale; choose another --tp"
    )
    routed = shared.replace("shared expert", "routed experts") + " or --expert-layout ep"
    assert find_split_problems(config, 8, "tp") == (shared, routed)
    assert find_split_problems(config, 8, "ep") == (shared,)
    for ranks in (1, 2, 4):
        for layout in LAYOUTS:
            assert find_split_problems(config, ranks, layout) == ()


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    config = make_config(None, {})
    with pytest.raises(CheckpointError, match=f"rank {rank} is not one of 2 ranks"):
        slice_of(make_entries(config)[0], config, rank, 2, "tp")
    with pytest.raises(CheckpointError, match=f"rank {rank} is not one of 2 ranks"):
        kv_heads_of(config, rank, 2)
