"""transformers' Glm4MoeForCausalLM with the rounding points of the engine, in float64 between them.

The structure, the placing of tensors, the expert dispatch, the cache and the mask are transformers' own code.
"""

import functools
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from transformers import Cache, Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.utils import ModelOutput
from transformers.utils import logging as transformers_logging

from tests.reference.expected import mean_kl
from tests.reference.numpy_model import has_input_groups
from tests.reference.rounded_parts import Backend, Rounding, patch
from tests.reference.sums import Float32Sums, Float64Sums

__all__ = ["BREAKAGES", "Breakage", "Reference", "expand_scale", "mean_kl", "read_checkpoint"]

Breakage = Literal[
    "rotary_halves",
    "bias_in_weights",
    "scaling_twice",
    "shared_dropped",
    "qk_norm_skipped",
    "scale_row_shifted",
    "groups_ignored",
]
BREAKAGES: tuple[Breakage, ...] = get_args(Breakage)
SMALL_HIDDEN_SIZE = 512
_SCALE_TILE = 128


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint as transformers takes it: config and exact float64 values under the names of the files."""

    config: Glm4MoeConfig
    values: dict[str, torch.Tensor]
    has_fp8: bool
    has_scale_rows: bool
    has_input_groups: bool

    def load(self) -> Glm4MoeForCausalLM:
        """Let transformers build the model in float64 and put every tensor in its place, but for an MTP layer."""
        transformers_logging.disable_progress_bar()
        mtp = f".layers.{self.config.num_hidden_layers}."
        model, report = Glm4MoeForCausalLM.from_pretrained(
            None,
            config=self.config,
            state_dict={name: value for name, value in self.values.items() if mtp not in name},
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        problems = {kind: names for kind, names in report.items() if names}
        if problems:
            raise ValueError(f"transformers did not take the checkpoint as it is: {problems}; mend the folder")
        return model.eval()


def read_checkpoint(folder: Path, is_scale_shifted: bool = False) -> StoredModel:
    """Read config and tensors; E4M3 weights become code times scale, which float64 holds exactly."""
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with_groups = has_input_groups(fields)
    fields.pop("quantization_config", None)
    raw: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            raw.update({name: file.get_tensor(name) for name in file.keys()})
    scales = {name: raw.pop(name) for name in list(raw) if name.endswith((".weight_scale", ".weight_scale_inv"))}
    values = {name: tensor.to(torch.float64) for name, tensor in raw.items()}
    for name, scale in scales.items():
        weight = name.removesuffix("_inv").removesuffix("_scale")
        shifted = scale.roll(1, 0) if is_scale_shifted else scale
        values[weight] = values[weight] * expand_scale(shifted.to(torch.float64), values[weight].shape)
    has_scale_rows = any(scale.shape[0] > 1 for scale in scales.values())
    return StoredModel(Glm4MoeConfig.from_dict(fields), values, bool(scales), has_scale_rows, with_groups)


def expand_scale(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Scale of each element; [out, 1] is per channel, [1] per tensor, otherwise one per 128x128 tile."""
    rows, cols = shape
    if scale.dim() < 2 or scale.shape == (rows, 1):
        return scale
    by_row = scale.repeat_interleave(_SCALE_TILE, 0)[:rows]
    return by_row.repeat_interleave(_SCALE_TILE, 1)[:, :cols]


def break_model(model: Glm4MoeForCausalLM, break_: Breakage) -> None:
    """Make the named mistake in a freshly loaded model; those of the router, scales and groups are made elsewhere."""
    for module in model.modules():
        if break_ == "rotary_halves" and isinstance(module, glm4_moe.Glm4MoeAttention):
            interleave_rotary(module)
        elif break_ == "scaling_twice" and isinstance(module, glm4_moe.Glm4MoeTopkRouter):
            module.routed_scaling_factor *= module.routed_scaling_factor
        elif break_ == "shared_dropped" and isinstance(module, glm4_moe.Glm4MoeMoE):
            module.shared_experts.register_forward_hook(lambda _, args, output: torch.zeros_like(output))
        elif break_ == "qk_norm_skipped" and isinstance(module, glm4_moe.Glm4MoeAttention):
            module.use_qk_norm = False


def interleave_rotary(attention: glm4_moe.Glm4MoeAttention) -> None:
    """Reorder q and k so that split halves rotate the pairs (2i, 2i + 1) instead of (i, i + half)."""
    head_dim = attention.head_dim
    rotary_dim = int(head_dim * attention.rope_parameters["partial_rotary_factor"])
    order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim)]
    parts = [attention.q_proj.weight, attention.k_proj.weight]
    if attention.q_proj.bias is not None:
        parts += [attention.q_proj.bias, attention.k_proj.bias]
    if attention.use_qk_norm:
        parts += [attention.q_norm.weight, attention.k_norm.weight]
    for part in parts:
        by_head = part.data.view(-1, head_dim, *part.shape[1:])
        part.data = by_head[:, order].reshape(part.shape).contiguous()


def refuse_invisible(stored: StoredModel, break_: Breakage) -> None:
    """Raise for a mistake that this checkpoint cannot show."""
    visible = {
        "scaling_twice": stored.config.routed_scaling_factor != 1.0,
        "qk_norm_skipped": stored.config.use_qk_norm,
        "scale_row_shifted": stored.has_scale_rows,
        "groups_ignored": stored.has_input_groups,
    }
    if not visible.get(break_, True):
        raise ValueError(f"{break_} changes nothing in this checkpoint; choose one with the part it breaks")


class Reference:
    """The model of a checkpoint folder with the rounding points, or with one deliberate mistake.

    float32_order takes all sums in float32 in that order instead of in float64. rounds_like chooses the backend whose
    rounding points are taken: with BF16 weights cuda rounds a GEMM's input, the cache and softmax weights to BF16.
    """

    def __init__(
        self,
        folder: Path,
        break_: Breakage | None = None,
        float32_order: int | None = None,
        rounds_like: Backend = "cpu",
    ) -> None:
        self.folder = Path(folder)
        self.rounds_like: Backend = rounds_like
        stored = read_checkpoint(self.folder, is_scale_shifted=break_ == "scale_row_shifted")
        self.config = stored.config
        self.has_fp8 = stored.has_fp8
        self.model = stored.load()
        if break_ is not None:
            refuse_invisible(stored, break_)
            break_model(self.model, break_)
        sums = Float64Sums() if float32_order is None else Float32Sums(float32_order)
        takes_groups = stored.has_input_groups and break_ != "groups_ignored"
        rounding = Rounding.of(rounds_like, stored.has_fp8, takes_groups, sums)
        patch(self.model, rounding, has_bias_in_weights=break_ == "bias_in_weights")

    @torch.no_grad()
    def forward(self, model: Glm4MoeForCausalLM, token_ids: list[int], cache: Cache | None = None) -> ModelOutput:
        """One forward pass of the patched or the plain model; small models on one thread, which is faster."""
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1 if self.config.hidden_size < SMALL_HIDDEN_SIZE else num_threads)
        try:
            return model(torch.tensor([token_ids]), past_key_values=cache, use_cache=True)
        finally:
            torch.set_num_threads(num_threads)

    def logits(self, token_ids: list[int]) -> NDArray[np.float64]:
        """Logits [len, vocab] of every position of one forward pass."""
        return self.forward(self.model, token_ids).logits[0].double().numpy()

    def greedy(self, prompt_ids: list[int], count: int) -> tuple[list[int], list[float]]:
        """count greedy tokens, the lower id among equals, and the gap between the best two logits at each."""
        tokens: list[int] = []
        gaps: list[float] = []
        inputs, cache = prompt_ids, None
        for _ in range(count):
            output = self.forward(self.model, inputs, cache)
            row = output.logits[0, -1].double().numpy()
            best = np.sort(row)[-2:]
            tokens.append(int(row.argmax()))
            gaps.append(float(best[1] - best[0]))
            inputs, cache = tokens[-1:], output.past_key_values
        return tokens, gaps

    def hidden_states(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Input of each layer and the output of the last, before the final norm: [layers + 1, len, hidden]."""
        states: list[NDArray[np.float32]] = []
        watched = [*self.model.model.layers, self.model.model.norm]
        hooks = [part.register_forward_pre_hook(lambda _, args: states.append(args[0][0].numpy())) for part in watched]
        try:
            self.logits(token_ids)
        finally:
            for hook in hooks:
                hook.remove()
        return np.stack(states)

    @functools.cached_property
    def plain_model(self) -> Glm4MoeForCausalLM:
        """transformers' model untouched, in float64, on the dequantised weights."""
        return read_checkpoint(self.folder).load()

    def plain_logits(self, token_ids: list[int]) -> NDArray[np.float64]:
        """Logits [len, vocab] of transformers' model untouched."""
        return self.forward(self.plain_model, token_ids).logits[0].double().numpy()

    def kl_between_orders(self, *sequences: list[int], orders: tuple[int, ...] = (0, 1, 2)) -> float:
        """Mean KL over all positions of the token sequences and all pairs of orders of float32 sums."""
        rows = []
        for order in orders:
            model = Reference(self.folder, float32_order=order, rounds_like=self.rounds_like)
            rows.append(np.concatenate([model.logits(token_ids) for token_ids in sequences]))
        return float(np.mean([mean_kl(first, second) for first, second in itertools.combinations(rows, 2)]))
