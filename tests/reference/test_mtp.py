"""The MTP layer in NumPy against transformers' own MtpLayer, in float64 on the same tensors."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.modeling_layers import MtpLayer
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe

from tests.reference.checkpoints import FAMILIES, Family, make_checkpoint
from tests.reference.numpy_model import NumpyModel
from tests.reference.transformers_reference import StoredModel, read_checkpoint

NUM_TOKENS = 12


def load_mtp_layer(stored: StoredModel) -> tuple[MtpLayer, glm4_moe.Glm4MoeForCausalLM]:
    """transformers' MtpLayer with the tensors of the layer behind the last, and a model that has that layer too."""
    index = stored.config.num_hidden_layers
    prefix = f"model.layers.{index}."
    extras = {
        name.removeprefix(prefix): stored.values.pop(name)
        for name in list(stored.values)
        if name.startswith(prefix) and name.split(".")[3] in ("enorm", "hnorm", "eh_proj", "shared_head")
    }
    stored.config.num_hidden_layers += 1
    stored.config.layer_types = None
    model = stored.load()
    layer = MtpLayer(stored.config, lambda *_: model.model.layers[index], glm4_moe.Glm4MoeRMSNorm, index).double()
    for part, name in (
        (layer.enorm, "enorm"),
        (layer.hnorm, "hnorm"),
        (layer.eh_proj, "eh_proj"),
        (layer.post_norm, "shared_head.norm"),
    ):
        part.weight.data = extras[f"{name}.weight"]
    return layer, model


@torch.no_grad()
def run_mtp_layer(stored: StoredModel, token_ids: list[int], normed: torch.Tensor) -> np.ndarray:
    """Logits [len, vocab] of transformers' layer over tokens from position 1 on, given the hidden states before."""
    layer, model = load_mtp_layer(stored)
    positions = torch.arange(1, len(token_ids) + 1)[None]
    embedded = model.model.embed_tokens(torch.tensor([token_ids]))
    mask = torch.full((len(token_ids), len(token_ids)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    drafted = layer(
        embedded,
        normed[None],
        position_embeddings=model.model.rotary_emb(embedded, position_ids=positions),
        attention_mask=mask,
        position_ids=positions,
        past_key_values=None,
    )
    return model.lm_head(drafted)[0].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layer_is_that_of_transformers(tmp_path: Path, family: Family) -> None:
    folder = make_checkpoint(tmp_path, family, "bf16", mtp="without copies", num_hidden_layers=3)
    source = np.random.default_rng(0)
    model = NumpyModel(folder)
    token_ids: list[int] = source.integers(0, model.vocab_size, NUM_TOKENS).tolist()
    normed = source.standard_normal((NUM_TOKENS, model.config["hidden_size"])).astype(np.float32)
    expected = run_mtp_layer(read_checkpoint(folder), token_ids, torch.from_numpy(normed).double())
    np.testing.assert_allclose(model.draft_logits(token_ids, normed), expected, rtol=0, atol=1e-4)
    swapped = model.draft_logits(token_ids, normed[::-1])
    assert np.abs(swapped - expected).max() > 1
