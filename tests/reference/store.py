"""Store what the reference answers: python -m tests.reference.store OUT_DIR."""

import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.reference.checkpoints import make_checkpoint, make_prompts
from tests.reference.expected import ExpectedAnswers, digest_folder
from tests.reference.shapes import Family, Weights
from tests.reference.transformers_reference import Reference

STORED: tuple[tuple[Family, Weights], ...] = (
    ("glm47", "fp8_channel"),
    ("air", "bf16"),
    ("groups", "fp8_block"),
    ("tied", "fp8_tensor"),
)
SEED = 0
TOKEN_COUNT = 32


def answer(family: Family, weights: Weights, folder: Path, seed: int = SEED) -> ExpectedAnswers:
    """Make the checkpoint in the folder, run the reference on its prompts and gather what it answers."""
    made = make_checkpoint(folder, family, weights, seed)
    reference = Reference(made)
    prompts = make_prompts(reference.config.vocab_size, seed)
    answers = [reference.greedy(prompt, TOKEN_COUNT) for prompt in prompts]
    return ExpectedAnswers(
        family=family,
        weights=weights,
        seed=seed,
        checkpoint_digest=digest_folder(made),
        prompts=tuple(tuple(prompt) for prompt in prompts),
        tokens=np.asarray([tokens for tokens, _ in answers], dtype=np.int32),
        gaps=np.asarray([gaps for _, gaps in answers], dtype=np.float32),
        logits=np.stack([reference.logits(prompt)[-1] for prompt in prompts]).astype(np.float32),
    )


def main() -> None:
    """Write one file per stored checkpoint."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.reference.store OUT_DIR")
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for family, weights in STORED:
        with tempfile.TemporaryDirectory() as folder:
            path = answer(family, weights, Path(folder)).write(out)
        print(f"{path}: {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
