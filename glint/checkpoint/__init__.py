"""Model folders: config, safetensors headers, the tensor table and the memory plan."""

from glint.checkpoint.config import GenerationConfig, ModelConfig
from glint.checkpoint.layout import Dtype, Part, Role
from glint.checkpoint.quantisation import ScaleKind
from glint.checkpoint.table import Checkpoint, Inspection, TableEntry, inspect_checkpoint, open_checkpoint

__all__ = [
    "Checkpoint",
    "Dtype",
    "GenerationConfig",
    "Inspection",
    "ModelConfig",
    "Part",
    "Role",
    "ScaleKind",
    "TableEntry",
    "inspect_checkpoint",
    "open_checkpoint",
]
