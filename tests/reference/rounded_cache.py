"""The reference whose keys behind the rotary embedding and values go through torch's float8_e4m3fn."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe

from tests.reference.transformers_reference import Reference

LARGEST = 448.0


def round_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3, saturating, as torch rounds."""
    return values.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(values.dtype)


@contextmanager
def rounded_cache_reference(folder: Path) -> Iterator[Reference]:
    """The reference that rounds what the cache keeps, as long as the context is open."""
    plain_rotary = glm4_moe.apply_rotary_pos_emb

    def rotary(query: torch.Tensor, key: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned_query, turned_key = plain_rotary(query, key, *rest)
        return turned_query, round_e4m3(turned_key)

    glm4_moe.apply_rotary_pos_emb = rotary
    try:
        model = Reference(folder)
        for module in model.model.modules():
            if isinstance(module, glm4_moe.Glm4MoeAttention):
                module.v_proj.register_forward_hook(lambda _, inputs, output: round_e4m3(output))
        yield model
    finally:
        glm4_moe.apply_rotary_pos_emb = plain_rotary
