"""Against transformers' Glm4MoeForCausalLM, run by torch on the same GPU on the same weights."""

from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from glint.engine.args import Kernels
from tests.gpu.cases import BF16_KEYS, CUDA_KERNELS, Case, CaseStore, Key, cuda_engine, logits_over
from tests.reference import transformers_reference as reference

KEPT_IN_FLOAT32 = "e_score_correction_bias"


@cache
def torch_logits(case: Case, dtype: torch.dtype) -> NDArray[np.float64]:
    """Logits [positions, vocab] of transformers' own model on the GPU; the selection bias stays in float32."""
    model = reference.read_checkpoint(case.folder).load().to("cuda")
    biases = {name: buffer.float() for name, buffer in model.named_buffers() if name.endswith(KEPT_IN_FLOAT32)}
    model.to(dtype)
    for name, buffer in model.named_buffers():
        if name in biases:
            buffer.data = biases[name]
    with torch.no_grad():
        rows = [model(torch.tensor([tokens], device="cuda")).logits[0].double().cpu() for tokens in case.sequences]
    return torch.cat(rows).numpy()


@pytest.mark.parametrize("kernels", CUDA_KERNELS)
@pytest.mark.parametrize("key", BF16_KEYS, ids="-".join)
def test_nearer_to_torch_in_float32_than_torch_in_bf16(
    cases: CaseStore, key: Key, kernels: Kernels, capsys: pytest.CaptureFixture[str]
) -> None:
    """glint rounds the inputs of GEMMs to BF16, torch in float32 nothing, and torch in BF16 more than glint."""
    case = cases.case(key)
    wanted, rounded = torch_logits(case, torch.float32), torch_logits(case, torch.bfloat16)
    with cuda_engine(case.folder, kernels) as engine:
        got = logits_over(engine, case.sequences)
    divergence, peer = reference.mean_kl(wanted, got), reference.mean_kl(wanted, rounded)
    with capsys.disabled():
        print(f"\n{'-'.join(key)} {kernels}: KL from torch float32 {divergence:.2e}; torch BF16's {peer:.2e}", end=" ")
    assert 0 < divergence < peer
