"""Which tokens transformers' logits processors keep, applied in our order."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.generation import logits_process as process

from tests.cpu.sampling_rows import Row, penalised_row
from tests.reference.recorded_cases import KEPT_PENALTY, KEPT_SEEDS

KNOWN = frozenset({"temperature", "min_p", "top_k", "top_p"})


def kept_by_transformers(settings: dict[str, Any]) -> NDArray[np.bool_]:
    """Whether each token is kept, [seeds, vocab]; refuses settings that transformers would not be told of."""
    unknown = settings.keys() - KNOWN
    assert not unknown, f"{', '.join(sorted(unknown))}: no processor of transformers is applied for it here"
    return np.stack([kept_of_row(penalised_row(seed, settings), settings) for seed in range(KEPT_SEEDS)])


def kept_of_row(row: Row, settings: dict[str, Any]) -> NDArray[np.bool_]:
    """Whether each token of one row is kept."""
    ids = torch.tensor([row.history])
    scores = torch.tensor(row.logits.astype(np.float64))[None]
    scores = process.RepetitionPenaltyLogitsProcessor(KEPT_PENALTY)(ids, scores)
    scores = process.TemperatureLogitsWarper(float(settings.get("temperature", 1.0)))(ids, scores)
    if "min_p" in settings:
        scores = process.MinPLogitsWarper(settings["min_p"])(ids, scores)
    if "top_k" in settings:
        scores = process.TopKLogitsWarper(settings["top_k"])(ids, scores)
    if "top_p" in settings:
        scores = process.TopPLogitsWarper(settings["top_p"])(ids, scores)
    kept: NDArray[np.bool_] = torch.isfinite(scores[0]).numpy()
    return kept
