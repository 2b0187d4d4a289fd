"""A model that transformers saves is a checkpoint that glint opens."""

from pathlib import Path

import numpy as np
import torch
import transformers

from glint.checkpoint.layout import Part, Role
from glint.checkpoint.table import open_checkpoint
from tests.pure.checkpoint_files import SMALL, make_specs


def test_a_model_that_transformers_saves_is_opened(tmp_path: Path) -> None:
    sizes = {name: value for name, value in SMALL.items() if not name.startswith(("rope", "partial", "torch", "tr"))}
    rotary = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    config = transformers.Glm4MoeConfig(**sizes, rope_parameters=rotary)
    model = transformers.Glm4MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="500KB")
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.files) > 1
    assert len(checkpoint.tensors) == len(make_specs(SMALL))
    entry = next(entry for entry in checkpoint.tensors if entry[:4] == (Role.DOWN, Part.WEIGHT, 1, 2))
    path = checkpoint.files[entry.file_index].path
    ours = np.fromfile(path, np.uint16, entry.rows * entry.cols, offset=entry.file_offset)
    theirs = model.model.layers[1].mlp.experts.down_proj[2].detach().view(torch.uint16).numpy()
    assert np.array_equal(ours, theirs.reshape(-1))
