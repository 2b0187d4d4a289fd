"""Recorded answers of the reference, for tests that do not load torch.

Only what is expected is recorded; a checkpoint is made again from its seed, and its digest is compared. The files are
written by python -m tests.reference.store and held to torch by tests/reference/test_recorded.py.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tests.reference.numpy_ops import FloatArray
from tests.reference.shapes import Family, Weights

RECORDED = Path(__file__).parent / "recorded"
GAP_BOUND = 0.02
LOGPROB_BOUND = 1e-4
LOGIT_BOUND = 1e-4
LAYER_BOUND = 1e-5
TOP_COUNT = 8
STATES_PROMPT = 1
NUM_SEQUENCES = 5
SEQUENCE_TOKENS = 128

Rows = NDArray[np.float64]


def log_softmax(rows: NDArray[np.floating[Any]]) -> Rows:
    """Log-probabilities of logits along the last axis, in float64."""
    wide = np.asarray(rows, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def mean_kl(expected: NDArray[np.floating[Any]], other: NDArray[np.floating[Any]]) -> float:
    """Mean over the rows of KL(softmax(expected) || softmax(other)), in nats."""
    left, right = log_softmax(expected), log_softmax(other)
    return float((np.exp(left) * (left - right)).sum(axis=-1).mean())


@dataclass(frozen=True)
class BestTokens:
    """The best tokens before each token of an answer and their log-probabilities, [count, TOP_COUNT], best first."""

    tokens: NDArray[np.int32]
    logprobs: FloatArray

    @classmethod
    def of_rows(cls, rows: Rows) -> "BestTokens":
        """Of logits [count, vocab]; the lower id comes first among equals."""
        logprobs = log_softmax(rows)
        order = np.argsort(-rows, axis=1, kind="stable")[:, :TOP_COUNT]
        return cls(order.astype(np.int32), np.take_along_axis(logprobs, order, axis=1).astype(np.float32))

    def first(self, count: int) -> "BestTokens":
        """Those before the first tokens of the answer."""
        return BestTokens(self.tokens[:count], self.logprobs[:count])

    @property
    def greedy(self) -> list[int]:
        """The best token at each place."""
        best: list[int] = self.tokens[:, 0].tolist()
        return best

    @property
    def gaps(self) -> FloatArray:
        """How far the best token is ahead of the next, in nats."""
        return self.logprobs[:, 0] - self.logprobs[:, 1]


@dataclass(frozen=True)
class RecordedModel:
    """What the reference computes on one checkpoint.

    prompts with the best tokens along their greedy answers; where they are recorded, the logits [vocab] behind the
    last prompt and what each layer gives out, [layers, len, hidden], over the prompt STATES_PROMPT.
    """

    checkpoint_digest: str
    prompts: list[list[int]]
    answers: list[BestTokens]
    logits: FloatArray
    layer_outputs: FloatArray

    def write(self, path: Path) -> Path:
        """Write a compressed file and return its path."""
        np.savez_compressed(
            path,
            checkpoint_digest=self.checkpoint_digest,
            prompt_tokens=np.concatenate([np.asarray(prompt, np.int32) for prompt in self.prompts]),
            prompt_lengths=np.asarray([len(prompt) for prompt in self.prompts], np.int32),
            tokens=np.stack([answer.tokens for answer in self.answers]),
            logprobs=np.stack([answer.logprobs for answer in self.answers]),
            logits=self.logits,
            layer_outputs=self.layer_outputs,
        )
        return path

    def check_folder(self, folder: Path) -> None:
        """Raise where a folder is not the checkpoint that was recorded."""
        digest = digest_folder(folder)
        if digest != self.checkpoint_digest:
            raise ValueError(
                f"the recorded checkpoint has digest {self.checkpoint_digest}, {folder} has {digest}; "
                "record the answers again with python -m tests.reference.store"
            )


def read_recorded(name: str, folder: Path = RECORDED) -> RecordedModel:
    """Read the recorded model of this name."""
    with np.load(folder / f"{name}.npz") as stored:
        ends = np.cumsum(stored["prompt_lengths"])[:-1]
        return RecordedModel(
            checkpoint_digest=str(stored["checkpoint_digest"]),
            prompts=[part.tolist() for part in np.split(stored["prompt_tokens"], ends)],
            answers=[BestTokens(*both) for both in zip(stored["tokens"], stored["logprobs"], strict=True)],
            logits=stored["logits"],
            layer_outputs=stored["layer_outputs"],
        )


def recorded_name(family: Family, weights: Weights, change: str | None = None) -> str:
    """Name of a recorded model: as it is, with a mistake, or with rounded keys and values."""
    return "-".join((family, weights) if change is None else (family, weights, change))


def digest_folder(folder: Path) -> str:
    """SHA-256 over names and bytes of the files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode("utf-8") + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()


def answer_problems(recorded: RecordedModel, logits_of: Callable[[list[int]], Rows]) -> list[str]:
    """Where another model does not agree with the recorded answers; it runs once over each prompt and answer.

    Of an answer nothing is compared behind a token that the other model does not choose, if the gap there is small.
    """
    problems = []
    for index, (prompt, answer) in enumerate(zip(recorded.prompts, recorded.answers, strict=True)):
        rows = logits_of(prompt + answer.greedy)[len(prompt) - 1 : -1]
        seen = BestTokens.of_rows(rows)
        parted = [place for place, token in enumerate(answer.greedy) if seen.greedy[place] != token]
        alike = parted[0] if parted else len(rows)
        if parted and seen.gaps[alike] >= GAP_BOUND:
            problems.append(f"prompt {index}: token {alike} is another, {seen.gaps[alike]:.2e} ahead")
        own = np.take_along_axis(log_softmax(rows), answer.tokens.astype(np.int64), axis=1)
        error = np.abs([own - answer.logprobs, seen.logprobs - answer.logprobs])[:, :alike].max(initial=0.0)
        if error >= LOGPROB_BOUND:
            problems.append(f"prompt {index}: log-probabilities differ by {error:.2e}")
    return problems


class Model(Protocol):
    """What computes logits [len, vocab] and hidden states [layers + 1, len, hidden]."""

    def logits(self, token_ids: list[int]) -> Rows:
        """Of every position."""

    def hidden_states(self, token_ids: list[int]) -> FloatArray:
        """Input of each layer and output of the last."""


def model_problems(recorded: RecordedModel, model: Model) -> list[str]:
    """Where another model does not agree with what is recorded."""
    problems = answer_problems(recorded, model.logits)
    if recorded.logits.size:
        error = np.abs(model.logits(recorded.prompts[-1])[-1] - recorded.logits).max()
        if error >= LOGIT_BOUND:
            problems.append(f"logits differ by {error:.2e}")
    if recorded.layer_outputs.size:
        states = model.hidden_states(recorded.prompts[STATES_PROMPT])
        for layer, (before, after, seen) in enumerate(zip(states, recorded.layer_outputs, states[1:], strict=False)):
            relative = np.linalg.norm(seen - after) / np.linalg.norm(after - before)
            if relative >= LAYER_BOUND:
                problems.append(f"layer {layer} differs by {relative:.2e} of what it adds")
    return problems


def make_sequences(token_limit: int) -> list[list[int]]:
    """Random sequences over which a divergence is taken, 640 positions together."""
    source = np.random.default_rng(0)
    sequences: list[list[int]] = source.integers(0, token_limit, (NUM_SEQUENCES, SEQUENCE_TOKENS)).tolist()
    return sequences


@dataclass(frozen=True)
class Yardstick:
    """Mean KL in nats over make_sequences between summation orders of the reference on one checkpoint."""

    checkpoint_digest: str
    between_orders: float


def read_yardsticks(folder: Path = RECORDED) -> dict[str, Yardstick]:
    """All recorded yardsticks by the name of their model."""
    stored = json.loads((folder / "divergence.json").read_text(encoding="utf-8"))
    return {name: Yardstick(**fields) for name, fields in stored.items()}


def read_yardstick(name: str, folder: Path) -> float:
    """The recorded divergence between orders on the checkpoint in the folder."""
    yardstick = read_yardsticks()[name]
    if digest_folder(folder) != yardstick.checkpoint_digest:
        raise ValueError(f"the divergence of {name} was recorded on another checkpoint; record it again")
    return yardstick.between_orders


def read_kept_tokens(folder: Path = RECORDED) -> tuple[list[dict[str, Any]], NDArray[np.bool_]]:
    """Sampling settings, and which tokens transformers keeps with each: [settings, seeds, vocab]."""
    with np.load(folder / "kept_tokens.npz") as stored:
        bits = np.unpackbits(stored["kept_bits"], axis=-1, count=int(stored["vocab_size"]))
        return json.loads(str(stored["settings"])), bits.astype(bool)
