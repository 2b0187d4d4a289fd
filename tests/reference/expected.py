"""Stored answers of the reference, for runs that cannot load torch.

Only what is expected is stored; the checkpoint is made again from the seed, and its digest is compared.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.reference.checkpoints import make_checkpoint
from tests.reference.shapes import FAMILIES, WEIGHTS, Family, Weights


@dataclass(frozen=True)
class ExpectedAnswers:
    """Greedy answers to some prompts of one random checkpoint.

    tokens and gaps are [prompts, count]; logits are those after the last token of each prompt, [prompts, vocab].
    """

    family: Family
    weights: Weights
    seed: int
    checkpoint_digest: str
    prompts: tuple[tuple[int, ...], ...]
    tokens: NDArray[np.int32]
    gaps: NDArray[np.float32]
    logits: NDArray[np.float32]

    @property
    def file_name(self) -> str:
        """Name of the stored file."""
        return f"{self.family}-{self.weights}.npz"

    def write(self, folder: Path) -> Path:
        """Write a compressed file into the folder and return its path."""
        path = folder / self.file_name
        np.savez_compressed(
            path,
            family=self.family,
            weights=self.weights,
            seed=self.seed,
            checkpoint_digest=self.checkpoint_digest,
            prompt_tokens=np.concatenate([np.asarray(prompt, dtype=np.int32) for prompt in self.prompts]),
            prompt_lengths=np.asarray([len(prompt) for prompt in self.prompts], dtype=np.int32),
            tokens=self.tokens,
            gaps=self.gaps,
            logits=self.logits,
        )
        return path

    def make_checkpoint(self, folder: Path) -> Path:
        """Make the checkpoint that the answers belong to; raise if it is not the same bytes."""
        made = make_checkpoint(folder, self.family, self.weights, self.seed)
        digest = digest_folder(made)
        if digest != self.checkpoint_digest:
            raise ValueError(
                f"{self.file_name} belongs to a checkpoint with digest {self.checkpoint_digest}, the one made now has "
                f"{digest}; store the answers again with python -m tests.reference.store"
            )
        return made


def read_expected(path: Path) -> ExpectedAnswers:
    """Read a file that ExpectedAnswers.write made."""
    with np.load(path) as stored:
        family, weights = str(stored["family"]), str(stored["weights"])
        ends = np.cumsum(stored["prompt_lengths"])[:-1]
        return ExpectedAnswers(
            family=next(name for name in FAMILIES if name == family),
            weights=next(name for name in WEIGHTS if name == weights),
            seed=int(stored["seed"]),
            checkpoint_digest=str(stored["checkpoint_digest"]),
            prompts=tuple(tuple(part.tolist()) for part in np.split(stored["prompt_tokens"], ends)),
            tokens=stored["tokens"],
            gaps=stored["gaps"],
            logits=stored["logits"],
        )


def digest_folder(folder: Path) -> str:
    """SHA-256 over names and bytes of the files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode("utf-8") + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()
