"""Checks that several ranks can share one model, before anything loads."""

from collections.abc import Iterator

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.layout import ExpertLayout
from glint.checkpoint.placement import find_split_problems
from glint.errors import EngineError

MAX_RANKS = 64


def check_slices(tp: int, row_slices: int) -> None:
    """Refuse numbers that cannot give the same sums at every number of ranks.

    Slices are joined by one binary tree. A rank that holds 1, 2, 4 or another power of two of them joins its own
    exactly as the tree does; a single rank holds the whole tree.
    """
    for name, value in (("tp", tp), ("row_slices", row_slices)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANKS:
            raise EngineError(f"{name} is {value!r}; it must be an integer from 1 to {MAX_RANKS}")
    share, rest = divmod(row_slices, tp)
    if rest or (tp > 1 and share & (share - 1)):
        raise EngineError(
            f"row_slices is {row_slices} and tp is {tp}; every rank holds 1, 2, 4 or another power of two of the "
            f"slices, so choose {tp}, {2 * tp} or {4 * tp}, or leave --row-slices out"
        )


def check_split(model: ModelConfig, tp: int, row_slices: int, expert_layout: ExpertLayout) -> None:
    """Refuse a model that cannot be shared so, with every reason at once."""
    check_slices(tp, row_slices)
    problems = list(find_split_problems(model, tp, expert_layout))
    if row_slices != tp and not problems:
        problems += _slice_problems(model, row_slices, expert_layout)
    if problems:
        reasons = "".join(f"\n  {problem}" for problem in problems)
        raise EngineError(f"tp {tp} and row_slices {row_slices} do not go with this model:{reasons}")


def _slice_problems(model: ModelConfig, row_slices: int, expert_layout: ExpertLayout) -> Iterator[str]:
    sizes = {"num_attention_heads * head_dim": model.num_heads * model.head_dim}
    if model.num_dense_layers:
        sizes["intermediate_size"] = model.dense_width
    if model.num_dense_layers < model.num_layers:
        sizes["shared expert width"] = model.shared_width
        is_ep = expert_layout == "ep"
        sizes["n_routed_experts" if is_ep else "moe_intermediate_size"] = (
            model.num_experts if is_ep else model.expert_width
        )
    for name, size in sizes.items():
        if size % row_slices:
            yield f"{name} {size} cannot be cut into {row_slices} slices; choose another --row-slices"
        elif model.input_group_size and name != "n_routed_experts" and size // row_slices % model.input_group_size:
            yield (
                f"{name} {size} in {row_slices} slices makes slices of {size // row_slices}, which cut through the "
                f"groups of {model.input_group_size} inputs that share a scale; choose another --row-slices"
            )
