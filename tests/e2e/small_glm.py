"""A small random GLM model with a tokenizer and GLM's chat layout: a folder that a server can serve quickly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.pure.text_folder import GLM_TEMPLATE, build_tokenizer, write_tokenizer
from tests.reference.checkpoints import Mtp, make_checkpoint

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 2048,
}


def write_small_glm(folder: Path, mtp: Mtp | None = None) -> Path:
    """Write the model, with an MTP layer where asked; the tokens that end a turn of GLM end an answer."""
    tokenizer = build_tokenizer()
    make_checkpoint(folder, "glm47", "bf16", mtp=mtp, vocab_size=-(-tokenizer.get_vocab_size() // 32) * 32, **SHAPE)
    ends = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
    return write_tokenizer(folder, GLM_TEMPLATE)
