"""The text that `glint check` prints."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.plan import ExpertLayout, MemoryPlan, plan_memory
from glint.checkpoint.quantisation import ScaleKind
from glint.checkpoint.table import Inspection, inspect_checkpoint

_LABEL_WIDTH = 18
_SCALE_TEXTS = {
    ScaleKind.NONE: "none, BF16",
    ScaleKind.CHANNEL: "FP8 E4M3, one scale per output channel",
    ScaleKind.TENSOR: "FP8 E4M3, one scale per tensor",
    ScaleKind.TILE: "FP8 E4M3, one scale per 128x128 tile",
}


def run_check(model_dir: Path, tp: int, expert_layout: ExpertLayout) -> tuple[str, bool]:
    """Inspect a model folder without loading weights; give the report and whether the folder can be used."""
    inspection = inspect_checkpoint(model_dir)
    plan: MemoryPlan | None = None
    if inspection.config is not None and inspection.tensors:
        plan = plan_memory(inspection.config, inspection.tensors, tp, expert_layout)
    is_usable = plan is not None and not inspection.problems and not plan.problems
    return render_check(inspection, plan), is_usable


def render_check(inspection: Inspection, plan: MemoryPlan | None) -> str:
    """Write what was found, the memory plan, the notes and all problems, numbered, as plain text."""
    lines = [f"Model folder {inspection.folder}", ""]
    if inspection.config is not None:
        lines.extend(_describe_model(inspection.config))
    lines.extend(_describe_files(inspection))
    if plan is not None:
        lines.extend(["", *_describe_plan(plan)])
    if plan is not None and inspection.config is not None and inspection.config.weight_scale_kind is ScaleKind.NONE:
        lines.append(_row("", f"{2 * plan.kv_bytes_per_token:,} on the CPU, where BF16 weights go with FP32 KV"))
    if inspection.notes:
        lines.extend(["", *_describe_list("Notes", inspection.notes)])
    problems = inspection.problems + (plan.problems if plan is not None else ())
    lines.append("")
    lines.extend(_describe_list("Problems", problems) if problems else ["No problems."])
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
        f"{config.num_groups} group{'s' if config.num_groups > 1 else ''}, shared width {config.shared_width}",
    )
    yield _row("positions", f"{config.max_positions:,}")
    yield _row("quantisation", _SCALE_TEXTS[config.weight_scale_kind])
    yield _row("embeddings", "tied" if config.tied_embeddings else "embedding and lm_head apart")


def _describe_files(inspection: Inspection) -> Iterator[str]:
    yield _row("weight files", f"{len(inspection.files)}, {format_bytes(sum(f.byte_count for f in inspection.files))}")
    yield _row("tensors", f"{inspection.num_tensors:,}, {format_bytes(inspection.tensor_bytes)}")
    if inspection.tensors:
        places = {(entry.file_index, entry.file_offset): entry.byte_count for entry in inspection.tensors}
        yield _row("used", f"{len(places):,}, {format_bytes(sum(places.values()))}")
    skipped: dict[str, list[int]] = defaultdict(list)
    for tensor in inspection.skipped:
        skipped[tensor.reason].append(tensor.byte_count)
    for reason, sizes in skipped.items():
        yield _row("skipped", f"{len(sizes):,}, {format_bytes(sum(sizes))}: {reason}")


def _describe_plan(plan: MemoryPlan) -> Iterator[str]:
    ranks = "1 rank" if plan.num_ranks == 1 else f"each of {plan.num_ranks} ranks"
    yield f"Memory plan for {ranks}, experts by {plan.expert_layout}"
    for name, byte_count in plan.parts:
        yield _row(name, format_bytes(byte_count))
    yield _row("weights", format_bytes(plan.weight_bytes))
    yield _row("KV cache", f"{plan.kv_bytes_per_token:,} bytes per token in BF16 ({plan.kv_heads} key/value heads)")


def _describe_list(title: str, lines: tuple[str, ...]) -> Iterator[str]:
    yield f"{title} ({len(lines)})"
    for number, line in enumerate(lines, 1):
        yield f"  {number}. {line}"
