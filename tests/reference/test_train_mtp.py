"""The training of MTP layers: many drafts at once are those that follow each other in the engine."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 9


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """scripts/train_mtp.py as a module."""
    spec = importlib.util.spec_from_file_location("train_mtp", ROOT / "scripts" / "train_mtp.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def test_drafts_attend_to_the_entries_of_the_engine(script: ModuleType) -> None:
    """A draft sees the entries of known tokens, then those of the drafts before it, one after the other."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    mtp = script.Mtp(LlamaForCausalLM(config)).eval()
    torch.nn.init.normal_(mtp.eh_proj.weight, std=0.3)
    embedded, states = torch.randn(1, LENGTH, 32), [torch.randn(1, LENGTH, 32)]
    for _ in range(3):
        states.append(mtp(embedded, states)[-1])
    for known in range(1, LENGTH - 2):
        chain = states[0][:, :known]
        for depth in range(3):
            (given,) = mtp(embedded[:, : known + depth], [chain])
            torch.testing.assert_close(given[:, -1], states[depth + 1][:, known + depth - 1], rtol=1e-4, atol=1e-5)
            chain = torch.cat([chain, given[:, -1:]], 1)
