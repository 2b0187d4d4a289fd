"""The text that `glint check` prints."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.layout import ExpertLayout
from glint.checkpoint.quantisation import ScaleKind
from glint.checkpoint.rank_memory import RankMemory, TensorKind, measure_rank
from glint.checkpoint.table import Inspection, inspect_checkpoint
from glint.errors import CheckpointError

_LABEL_WIDTH = 18
_KIND_COLUMNS = ("tensors", "type", "in the model", "split by", "on a rank", "bytes on a rank")
_SCALE_TEXTS = {
    ScaleKind.NONE: "none, BF16",
    ScaleKind.CHANNEL: "FP8 E4M3, one scale per output channel",
    ScaleKind.TENSOR: "FP8 E4M3, one scale per tensor",
    ScaleKind.TILE: "FP8 E4M3, one scale per 128x128 tile",
}


def run_check(model_dir: Path, tp: int, expert_layout: ExpertLayout, name: str | None = None) -> tuple[str, bool]:
    """Inspect a model folder without loading weights; give the report and whether the folder can be used.

    `name` is what the report calls the model, by default its folder.

    It can be used where nothing is wrong with it and `tp` ranks can hold it in this layout.
    """
    inspection = inspect_checkpoint(model_dir)
    plan: RankMemory | None = None
    mtp_plan: RankMemory | None = None
    if inspection.config is not None:
        try:
            plan = measure_rank(inspection.config, inspection.tensors, tp, expert_layout)
            mtp_plan = measure_rank(inspection.config, inspection.mtp_tensors, tp, expert_layout)
        except CheckpointError as error:
            inspection = replace(inspection, problems=inspection.problems + error.problems)
    return render_check(inspection, plan, name, mtp_plan), not inspection.problems


def render_check(
    inspection: Inspection, plan: RankMemory | None, name: str | None = None, mtp_plan: RankMemory | None = None
) -> str:
    """Write what was found, where it goes, the notes and all problems, numbered, as plain text."""
    lines = [f"Model folder {inspection.folder}" if name is None else f"Model {name}", ""]
    if inspection.config is not None:
        lines.extend(_describe_model(inspection.config))
    lines.extend(_describe_files(inspection))
    if plan is not None and inspection.config is not None and inspection.tensors:
        lines.extend(["", *_describe_plan(plan, inspection.config)])
    if mtp_plan is not None and inspection.config is not None and inspection.mtp_tensors:
        lines.extend(_describe_mtp(mtp_plan, inspection.config))
    if inspection.notes:
        lines.extend(["", *_describe_list("Notes", inspection.notes)])
    lines.append("")
    lines.extend(_describe_list("Problems", inspection.problems) if inspection.problems else ["No problems."])
    return "\n".join(lines) + "\n"


def format_bytes(count: int) -> str:
    """Write a byte count in decimal and binary units."""
    if count < 1_000_000:
        return f"{count:,} bytes"
    if count < 1_000_000_000:
        return f"{count / 1e6:.2f} MB ({count / 2**20:.2f} MiB)"
    return f"{count / 1e9:.2f} GB ({count / 2**30:.2f} GiB)"


def _row(label: str, text: str) -> str:
    return f"  {label:<{_LABEL_WIDTH}}{text}"


def _describe_model(config: ModelConfig) -> Iterator[str]:
    moe_layers = config.num_layers - config.num_dense_layers
    heads = f"{config.num_heads} query and {config.num_kv_heads} key/value heads of {config.head_dim}"
    options = {"q/k norm": config.has_qk_norm, "bias": config.has_attention_bias}
    extras = [name for name, is_on in options.items() if is_on]
    yield _row("architecture", config.architecture)
    yield _row("layers", f"{config.num_layers} ({config.num_dense_layers} dense, {moe_layers} with experts)")
    yield _row("hidden size", f"{config.hidden_size}, vocabulary {config.vocab_size}")
    yield _row("attention", ", ".join([heads, f"{config.rotary_dim} dims of each rotary", *extras]))
    yield _row(
        "experts",
        f"{config.num_experts} of width {config.expert_width}, {config.experts_per_token} per token, "
        f"shared width {config.shared_width}",
    )
    yield _row("positions", f"{config.max_positions:,}")
    yield _row("quantisation", _SCALE_TEXTS[config.weight_scale_kind])
    yield _row("activations", _describe_activations(config))
    yield _row("embeddings", "tied" if config.tied_embeddings else "embedding and lm_head apart")


def _describe_activations(config: ModelConfig) -> str:
    if config.weight_scale_kind is ScaleKind.NONE:
        return "not quantised"
    if config.input_group_size == 0:
        return "FP8 E4M3, one scale per token"
    return f"FP8 E4M3, one scale per token and group of {config.input_group_size}; on the CPU only"


def _describe_files(inspection: Inspection) -> Iterator[str]:
    yield _row("weight files", f"{len(inspection.files)}, {format_bytes(sum(f.byte_count for f in inspection.files))}")
    yield _row("tensors", f"{inspection.num_tensors:,}, {format_bytes(inspection.tensor_bytes)}")
    if inspection.tensors:
        places = {(entry.file_index, entry.file_offset): entry.byte_count for entry in inspection.tensors}
        yield _row("used", f"{len(places):,}, {format_bytes(sum(places.values()))}")
    if inspection.mtp_tensors:
        byte_count = sum(entry.byte_count for entry in inspection.mtp_tensors)
        yield _row("MTP layer", f"{len(inspection.mtp_tensors):,}, {format_bytes(byte_count)}")
    skipped: dict[str, list[int]] = defaultdict(list)
    for tensor in inspection.skipped:
        skipped[tensor.reason].append(tensor.byte_count)
    for reason, sizes in skipped.items():
        yield _row("skipped", f"{len(sizes):,}, {format_bytes(sum(sizes))}: {reason}")


def _describe_plan(plan: RankMemory, config: ModelConfig) -> Iterator[str]:
    ranks = "1 rank" if plan.tp == 1 else f"each of {plan.tp} ranks"
    yield f"Memory plan for {ranks}, experts by {plan.expert_layout}"
    total = ("weights", "", "", "", "", format_bytes(plan.weight_bytes))
    yield from _align([_KIND_COLUMNS, *map(_describe_kind, plan.kinds), total])
    heads = f"{plan.kv_heads} of {config.num_kv_heads} key/value heads"
    if plan.kv_copies > 1:
        heads += f", each on {plan.kv_copies} ranks"
    yield _row("KV cache", f"{plan.kv_bytes_per_token:,} bytes per token in BF16 ({heads})")
    if config.weight_scale_kind is ScaleKind.NONE:
        yield _row("", f"{2 * plan.kv_bytes_per_token:,} on the CPU, where BF16 weights go with FP32 KV")


def _describe_mtp(plan: RankMemory, config: ModelConfig) -> Iterator[str]:
    cache = f"{plan.kv_bytes_per_token // config.num_layers:,} bytes of KV cache per token"
    yield _row("MTP layer", f"{format_bytes(plan.weight_bytes)} and {cache} more, with --num-speculative-tokens")
    if config.mtp_vocab_size < config.vocab_size:
        yield _row("", f"drafts among the first {config.mtp_vocab_size:,} tokens on the CPU, among all on GPUs")
    if any(kind.name in ("embedding", "lm_head") for kind in plan.kinds):
        yield _row("", "less where its embedding and head equal those of the model, which then serve for both")


def _describe_kind(kind: TensorKind) -> tuple[str, ...]:
    share = "none" if kind.share is None else f"{kind.rank_count:,} of {kind.share.row_count} x {kind.share.col_count}"
    return (
        kind.name,
        kind.dtype.name,
        f"{kind.count:,} of {kind.rows} x {kind.cols}",
        _split_name(kind),
        share,
        "in the embedding" if kind.is_view else format_bytes(kind.rank_bytes),
    )


def _split_name(kind: TensorKind) -> str:
    if kind.share is None or kind.rank_count < kind.count:
        return "experts"
    if kind.share.row_count < kind.rows:
        return "rows"
    return "columns" if kind.share.col_count < kind.cols else "whole"


def _align(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()


def _describe_list(title: str, lines: tuple[str, ...]) -> Iterator[str]:
    yield f"{title} ({len(lines)})"
    for number, line in enumerate(lines, 1):
        yield f"  {number}. {line}"
