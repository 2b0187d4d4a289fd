"""A model with random weights as a file that both engines read: every tensor of a config, of plausible sizes."""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from glint.checkpoint.config import GenerationConfig, ModelConfig
from glint.checkpoint.layout import Dtype, ExpectedTensor, Part, Role, expected_tensors
from glint.checkpoint.shards import CheckpointFile
from glint.checkpoint.table import Checkpoint, TableEntry

ALIGNMENT = 256
E4M3_DEVIATION = 16.0
GAINS = {
    Role.QUERY: 1.4,
    Role.KEY: 1.4,
    Role.OUTPUT: 1.2,
    Role.GATE: 1.5,
    Role.SHARED_GATE: 1.5,
    Role.ROUTER: 1.6,
    Role.LM_HEAD: 3.0,
}
NORMS = frozenset(
    {Role.FINAL_NORM, Role.INPUT_NORM, Role.POST_ATTENTION_NORM, Role.QUERY_NORM, Role.KEY_NORM},
)
BIAS_DEVIATIONS = {Role.QUERY: 0.7, Role.KEY: 0.7, Role.VALUE: 0.3, Role.ROUTER: 0.1}


def write_random_model(path: Path, config: ModelConfig, seed: int = 0) -> Checkpoint:
    """Write the tensors of `config` one behind the other; the same arguments give the same bytes."""
    source = np.random.default_rng(seed)
    codes = normal_e4m3(source)
    entries = []
    cols = 1
    with path.open("wb") as file:
        for tensor in expected_tensors(config):
            cols = tensor.cols if tensor.part is Part.WEIGHT else cols
            data = draw(source, codes, tensor, cols)
            file.write(bytes(-file.tell() % ALIGNMENT))
            kind = (tensor.role, tensor.part, tensor.layer, tensor.expert, tensor.dtypes[-1])
            entries.append(TableEntry(*kind, tensor.rows, tensor.cols, 0, file.tell(), len(data)))
            file.write(data)
        files = (CheckpointFile(path, file.tell()),)
    return Checkpoint(path.parent, config, GenerationConfig(), files, tuple(entries), (), ())


def normal_e4m3(source: np.random.Generator) -> NDArray[np.uint8]:
    """256 E4M3 values of a normal distribution of E4M3_DEVIATION, as bytes; none is NaN."""
    exact = source.standard_normal(256) * E4M3_DEVIATION
    exponents = np.clip(np.floor(np.log2(np.abs(exact))), -6, 7)
    steps = np.round(np.abs(exact) / 2.0 ** (exponents - 3)).astype(int)
    codes = np.where(steps < 8, steps, ((exponents + 7) * 8 + steps - 8)).astype(int)
    return np.where(exact < 0, 128 + codes, codes).astype(np.uint8)


def draw(source: np.random.Generator, codes: NDArray[np.uint8], tensor: ExpectedTensor, cols: int) -> bytes:
    """The bytes of a tensor; `cols` are those of the weight that it belongs to."""
    count = tensor.rows * tensor.cols
    deviation = GAINS.get(tensor.role, 1.0) / (1.0 if tensor.role is Role.EMBEDDING else math.sqrt(cols))
    if tensor.dtypes[-1] is Dtype.F8_E4M3:
        return bytes(codes[source.integers(0, len(codes), count, np.uint8)])
    if tensor.part is Part.SCALE:
        values = (0.5 + source.random(count, np.float32)) * np.float32(deviation / E4M3_DEVIATION)
    elif tensor.role in NORMS:
        values = 0.4 + np.float32(1.2) * source.random(count, np.float32)
    else:
        size = BIAS_DEVIATIONS[tensor.role] if tensor.part is Part.BIAS else deviation
        values = source.standard_normal(count, np.float32) * np.float32(size)
    if tensor.dtypes[-1] is Dtype.BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.tobytes()
