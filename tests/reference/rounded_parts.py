"""The parts of transformers' Glm4Moe with the rounding points of the engine.

Activations travel as float32 tensors, so that every residual addition is one float32 rounding; each part computes in
float64 and rounds once. Matrices are replaced by Weight objects, which torch's linear function multiplies by.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe

from tests.reference.numpy_model import Backend
from tests.reference.sums import Sums

InputRounding = Literal["float32", "bfloat16", "e4m3", "e4m3_groups"]

MAX_POSITIONS = 1024
_ATTENTION = "rounded_eager"
_E4M3_MAX = 448.0
_GROUP_SIZE = 128


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 as float64 values and scales [rows, 1] of float32 rows, by the absolute maximum over 448."""
    largest = rows.abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, torch.ones_like(largest), largest / _E4M3_MAX)
    fp8 = (rows / scale).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return fp8.to(torch.float64), scale.to(torch.float64)


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix [out, in] in float64 that torch's linear function multiplies by with the rounding points.

    The input is rounded to float32 and then to bfloat16, or quantised per row or per 128 values of a row; the result
    is a float32 tensor.
    """

    matrix: torch.Tensor
    input_rounding: InputRounding
    sums: Sums

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: tuple, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> torch.Tensor:
        if func is not nn.functional.linear or kwargs:
            return NotImplemented
        rows, weight, bias = (*args, None)[:3]
        return weight.multiply(rows, bias)

    def multiply(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """f32(a * sum + bias) for rows [any, in], with groups f32(the sum over groups of a * sum, + bias)."""
        rows, matrix = rows.to(torch.float32), self.matrix.transpose(0, 1)
        if self.input_rounding == "e4m3_groups":
            parts = zip(rows.split(_GROUP_SIZE, -1), matrix.split(_GROUP_SIZE, 0), strict=True)
            result = torch.stack([self.multiply_fp8(part, group) for part, group in parts]).sum(0)
        elif self.input_rounding == "e4m3":
            result = self.multiply_fp8(rows, matrix)
        else:
            result = self.sums.multiply(rows.to(getattr(torch, self.input_rounding)).to(torch.float64), matrix)
        return (result if bias is None else result + bias).to(torch.float32)

    def multiply_fp8(self, rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """a * sum for rows that have one scale each."""
        values, scale = quantise(rows)
        return scale * self.sums.multiply(values, matrix)


@dataclass(frozen=True, eq=False)
class WeightStack:
    """The experts' matrices [experts, out, in]; indexing gives one expert's Weight."""

    matrices: torch.Tensor
    input_rounding: InputRounding
    sums: Sums

    def __getitem__(self, expert: torch.Tensor) -> Weight:
        return Weight(self.matrices[int(expert)], self.input_rounding, self.sums)


class WideSilu(nn.Module):
    """SiLU in float64, left unrounded: the product with up is rounded by the matrix it goes into."""

    def forward(self, gate: torch.Tensor) -> torch.Tensor:
        """gate / (1 + exp(-gate))."""
        wide = gate.to(torch.float64)
        return wide / (1.0 + torch.exp(-wide))


def norm_forward(module: nn.Module, sums: Sums, rows: torch.Tensor) -> torch.Tensor:
    """RMSNorm with one rounding at the end."""
    wide = rows.to(torch.float64)
    ones = torch.ones(wide.shape[-1], 1, dtype=torch.float64)
    mean_square = sums.multiply(wide * wide, ones) / wide.shape[-1]
    return (module.weight * wide / torch.sqrt(mean_square + module.variance_epsilon)).to(torch.float32)


def rotary_forward(
    config: Glm4MoeConfig, rows: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine made in float64 and rounded to float32, as float64 tensors so that rotation is not rounded."""
    rope = config.rope_parameters
    rotary_dim = int(config.head_dim * rope["partial_rotary_factor"])
    inverse = rope["rope_theta"] ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = position_ids.to(torch.float64).unsqueeze(-1) * inverse
    both = torch.cat((angles, angles), dim=-1)
    return both.cos().float().double(), both.sin().float().double()


def rounded_eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' eager attention with rounded scores, weights and result."""
    if key.shape[2] > MAX_POSITIONS:
        raise ValueError(f"context of {key.shape[2]} positions; the reference goes to {MAX_POSITIONS}, one split")
    policy: Rounding = module.rounding
    query, key, value = policy.cached(query), policy.cached(key), policy.cached(value)
    key = glm4_moe.repeat_kv(key, module.num_key_value_groups)
    value = glm4_moe.repeat_kv(value, module.num_key_value_groups)
    scores = (policy.sums.multiply(query, key.transpose(2, 3)) * scaling).to(torch.float32)
    scores = scores.masked_fill(attention_mask != 0, float("-inf")).to(torch.float64)
    powers = scores * math.log2(math.e)
    raw = torch.exp2(powers - powers.amax(-1, keepdim=True).ceil()).to(torch.float32)
    total = policy.sums.multiply(raw.double(), torch.ones(raw.shape[-1], 1, dtype=torch.float64))
    weights = policy.cached(raw)
    result = (policy.sums.multiply(weights, value) / total).to(torch.float32)
    return result.transpose(1, 2).contiguous(), weights


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, rounded_eager_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, eager_mask)


@dataclass(frozen=True)
class Rounding:
    """Where a model rounds: the inputs of its GEMMs and of lm_head, and cache and softmax weights to bfloat16."""

    gemms: InputRounding
    lm_head: InputRounding
    has_bf16_cache: bool
    sums: Sums

    @classmethod
    def of(cls, backend: Backend, has_fp8: bool, has_input_groups: bool, sums: Sums) -> "Rounding":
        """The rounding points of a backend for checkpoints with or without E4M3 weights."""
        of_bf16_weights: InputRounding = "bfloat16" if backend == "cuda" else "float32"
        of_fp8_weights: InputRounding = "e4m3_groups" if has_input_groups else "e4m3"
        gemms = of_fp8_weights if has_fp8 else of_bf16_weights
        return cls(gemms, of_bf16_weights, gemms != "float32", sums)

    def cached(self, values: torch.Tensor) -> torch.Tensor:
        """The value as the cache or the softmax keeps it, as a float64 tensor."""
        rounded = values.to(torch.float32)
        return (rounded.to(torch.bfloat16) if self.has_bf16_cache else rounded).to(torch.float64)


def router_forward(
    module: nn.Module, has_bias_in_weights: bool, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The router with rounded scores and lower index first among equals; weights are float64 tensors."""
    logits = nn.functional.linear(hidden.reshape(-1, module.hidden_dim), module.weight)
    scores = torch.sigmoid(logits.to(torch.float64)).to(torch.float32)
    chosen_by = scores + module.e_score_correction_bias.to(torch.float32)
    experts = largest(chosen_by, module.top_k)
    weights = (chosen_by if has_bias_in_weights else scores).gather(1, experts).to(torch.float64)
    if module.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = (weights * module.routed_scaling_factor).to(torch.float32)
    return logits, weights.to(torch.float64), experts


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the largest values of each row, lower index first among equals."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def patch(model: Glm4MoeForCausalLM, rounding: Rounding, has_bias_in_weights: bool = False) -> None:
    """Give every part of the model its rounding points."""
    sums = rounding.sums
    model.config._attn_implementation = _ATTENTION
    model.model.rotary_emb.forward = functools.partial(rotary_forward, model.config)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            input_rounding = rounding.lm_head if name == "lm_head" else rounding.gemms
            replace_parameter(module, "weight", Weight(module.weight.data, input_rounding, sums))
        elif isinstance(module, glm4_moe.Glm4MoeRMSNorm):
            module.forward = functools.partial(norm_forward, module, sums)
        elif isinstance(module, glm4_moe.Glm4MoeAttention):
            module.rounding = rounding
        elif isinstance(module, glm4_moe.Glm4MoeTopkRouter):
            replace_parameter(module, "weight", Weight(module.weight.data, "float32", sums))
            module.forward = functools.partial(router_forward, module, has_bias_in_weights)
        elif isinstance(module, glm4_moe.Glm4MoeExperts):
            for stack in ("gate_up_proj", "down_proj"):
                replace_parameter(module, stack, WeightStack(getattr(module, stack).data, rounding.gemms, sums))
            module.register_forward_pre_hook(lambda _, args: (args[0].to(torch.float64), *args[1:]))
        elif isinstance(module, glm4_moe.Glm4MoeMoE):
            module.register_forward_hook(lambda _, args, output: output.to(torch.float32))
        if hasattr(module, "act_fn"):
            module.act_fn = WideSilu()
    model.model.embed_tokens.weight = nn.Parameter(model.model.embed_tokens.weight.data.to(torch.float32))


def replace_parameter(module: nn.Module, name: str, value: Weight | WeightStack) -> None:
    """Put a Weight where a torch parameter was."""
    delattr(module, name)
    setattr(module, name, value)
