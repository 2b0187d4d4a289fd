"""The MTP layer of the sample model, which scripts/train_mtp.py trained: in the package, or not there."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from glint.checkpoint.safetensors import read_header
from glint.errors import CheckpointError
from glint.sample.convert import expert_tensors

MTP_FILE: Final = Path(__file__).with_name("mtp.safetensors")
MTP_VOCAB_SIZE: Final = 16384
_MLP: Final = ("gate", "up", "down")


def mtp_digest(path: Path = MTP_FILE) -> str | None:
    """Gives the SHA-256 of the trained layer; None where the package has none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def add_mtp(config: dict[str, Any]) -> dict[str, Any]:
    """Gives config.json of the model with its MTP layer, whose router and eh_proj stay unquantised.

    The layer drafts among the first tokens of the vocabulary, those of the earliest merges: they are frequent.
    """
    layer = f"model.layers.{config['num_hidden_layers']}"
    changed = config | {"num_nextn_predict_layers": 1, "mtp_vocab_size": MTP_VOCAB_SIZE}
    if "quantization_config" in config:
        quantisation = config["quantization_config"]
        ignored = [*quantisation["ignore"], f"{layer}.mlp.gate", f"{layer}.eh_proj"]
        changed["quantization_config"] = quantisation | {"ignore": ignored}
    return changed


def mtp_tensors(
    layer: int, head: NDArray[np.float32] | None, path: Path = MTP_FILE
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yields the tensors of the trained layer by their checkpoint names in float32, the MLP cut into experts.

    With a `head` the layer has one of its own; without, it drafts by the main model's.
    """
    if head is not None:
        yield f"model.layers.{layer}.shared_head.head.weight", head
    target = f"model.layers.{layer}"
    tensors = _read_bf16(path)
    parts = {name: f"{target}.mlp.{name}_proj.weight" for name in _MLP}
    missing = [name for name in (f"{target}.eh_proj.weight", *parts.values()) if name not in tensors]
    if missing:
        raise CheckpointError(f"{path} has no {missing[0]}; write it anew with scripts/train_mtp.py")
    mlp = {name: tensors.pop(part) for name, part in parts.items()}
    yield from tensors.items()
    yield from expert_tensors(target, mlp)


def _read_bf16(path: Path) -> dict[str, NDArray[np.float32]]:
    header = read_header(path)
    data = np.fromfile(path, np.uint8, offset=header.data_start)
    tensors = {}
    for name, info in header.tensors.items():
        if info.dtype != "BF16":
            raise CheckpointError(f"{path}: {name} is {info.dtype}, BF16 is needed; run scripts/train_mtp.py")
        bits = data[info.begin : info.end].view(np.uint16).astype(np.uint32) << 16
        tensors[name] = bits.view(np.float32).reshape(info.shape)
    return tensors
