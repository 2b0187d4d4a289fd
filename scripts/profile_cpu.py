#!/usr/bin/env python3
"""Profiles a decode step on the CPU with perf: .venv/bin/python scripts/profile_cpu.py --batch 1,8,32.

Needs perf (Debian: linux-perf). All threads of the engine are sampled while the requests decode, and so is a thread's
wait for the others. Figures belong in docs/results.md.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import get_args

import numpy as np

from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.engine.args import EngineArgs, Kernels
from glint.engine.engine import Engine
from glint.engine.settings import EngineSettings
from glint.sample.model import make_sample_model
from glint.sampling import SamplingParams
from glint.terminal import print_table

PROMPT_TOKENS = 64
SAMPLES_PER_SECOND = 1999
WAITING = r"ThreadTeam::(run_together|take|wait|work)|clock_gettime|sched_yield"
GROUPS = {
    "E4M3 products": r"Fp8|TileGemm|multiply_fp8|transpose_pairs",
    "BF16 products: head and router": r"Bf16(Pairs|Weights|Reader)",
    "attention": r"LaneAttention",
    "sampling": r"scan_row|sample|log_sum_exp|choose_token",
}
WAITS = "waiting for other threads"
REST = "norms, rotation, quantise, SwiGLU, sums of experts"
OUTSIDE = "Python and the system"
Profile = tuple[float, dict[str, float]]
REPORT_LINE = re.compile(r"^\s*([\d.]+)%\s+(\S+)\s+\[.\]\s+(.*)$")


def group_of(library: str, symbol: str) -> str:
    """The group of a sampled function."""
    if re.search(WAITING, symbol):
        return WAITS
    if not library.startswith("libglint"):
        return OUTSIDE
    return next((name for name, pattern in GROUPS.items() if re.search(pattern, symbol)), REST)


def read_shares(recorded: Path) -> dict[str, float]:
    """The samples of a recording by group, in per cent."""
    command = ["perf", "report", "-i", str(recorded), "--stdio", "--no-children", "--sort", "dso,symbol"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    shares = dict.fromkeys([*GROUPS, REST, WAITS, OUTSIDE], 0.0)
    for line in report.splitlines():
        found = REPORT_LINE.match(line)
        if found is not None:
            shares[group_of(found[2], found[3])] += float(found[1])
    return shares


def profile(checkpoint: Checkpoint, folder: Path, kernels: Kernels, batch: int, steps: int) -> Profile:
    """Milliseconds of the median decode step of `batch` requests, and what it spends its time on."""
    room = PROMPT_TOKENS + 2 * batch + steps + 8
    args = EngineArgs(kernels=kernels, num_speculative_tokens=0, max_model_len=room, max_num_seqs=batch)
    settings = EngineSettings.resolve(folder, checkpoint.config, args, has_mtp=bool(checkpoint.mtp_tensors))
    params = SamplingParams(temperature=0.0, max_tokens=room - PROMPT_TOKENS, ignore_eos=True)
    numbers = np.random.default_rng(1)
    seconds = []
    with Engine(checkpoint, settings, None) as engine, tempfile.TemporaryDirectory() as scratch:
        for _ in range(batch):
            engine.submit(numbers.integers(1000, 20000, PROMPT_TOKENS).tolist(), params)
        while engine.num_waiting or engine.last_step.num_tokens != batch:
            engine.step()
        recorded = Path(scratch) / "perf.data"
        options = ["-q", "-F", str(SAMPLES_PER_SECOND), "-e", "cpu-clock", "-o", str(recorded), "-p", str(os.getpid())]
        with subprocess.Popen(["perf", "record", *options]) as perf:
            for _ in range(steps):
                began_at = time.perf_counter()
                engine.step()
                seconds.append(time.perf_counter() - began_at)
            perf.send_signal(signal.SIGINT)
        if not recorded.is_file():
            raise SystemExit("profile_cpu: perf recorded nothing; run as root, or set kernel.perf_event_paranoid to 1")
        return 1e3 * median(seconds), read_shares(recorded)


def main() -> None:
    """Profile each number of requests and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="model folder (default: the FP8 sample model)")
    parser.add_argument("--kernels", default="auto", choices=get_args(Kernels), help="kernel set (default: auto)")
    parser.add_argument("--batch", default="1,8,32", help="requests that decode together (default: 1,8,32)")
    parser.add_argument("--steps", type=int, default=150, help="decode steps of each (default: 150)")
    args = parser.parse_args()
    if shutil.which("perf") is None:
        parser.error("no perf on the path; install it (Debian: apt-get install linux-perf)")
    folder = args.model or make_sample_model("fp8")
    checkpoint = open_checkpoint(folder)
    batches = [int(batch) for batch in args.batch.split(",")]
    profiles = [profile(checkpoint, folder, args.kernels, batch, args.steps) for batch in batches]
    rows = [["milliseconds", *(f"{milliseconds:.1f}" for milliseconds, _ in profiles)]]
    rows += [[name, *(f"{shares[name]:.0f}%" for _, shares in profiles)] for name in profiles[0][1]]
    print_table(f"decode step, {args.kernels}", ["", *(f"{batch} at once" for batch in batches)], rows)


if __name__ == "__main__":
    main()
