"""The command: chooses the parts, runs them one after the other, prints and writes what they found."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from glint.bench.machine import processor_name
from tests.reliability.faults import FAULTS, faults
from tests.reliability.fuzz import fuzz
from tests.reliability.idle import idle
from tests.reliability.kill import kill
from tests.reliability.options import Options
from tests.reliability.overload import overload
from tests.reliability.report import PartReport, document
from tests.reliability.slow import slow
from tests.reliability.soak import soak
from tests.reliability.streams import streams

ROOT = Path(__file__).resolve().parents[2]
OPENING = ROOT / "tests" / "reliability" / "opening.md"
PARTS: Mapping[str, Callable[[Options], PartReport]] = {
    "soak": soak,
    "fuzz": fuzz,
    "overload": overload,
    "faults": faults,
    "slow": slow,
    "idle": idle,
    "kill": kill,
    "streams": streams,
}
EXIT_BROKEN = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that were asked for; the exit code is 1 where a promise does not hold."""
    chosen = parse(arguments)
    if chosen.recorded:
        runs = [json.loads(path.read_text()) for path in chosen.recorded]
        write_files(chosen, runs)
        return int(
            any(promise["holds"] is False for run in runs for part in run["parts"] for promise in part["promises"])
        )
    console = Console(width=None if sys.stdout.isatty() else 160)
    with ExitStack() as stack:
        folder = chosen.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reliability-")))
        options = read_options(chosen, folder)
        reports = [run_part(name, options, console) for name in chosen.parts or PARTS]
    broken = [f"{report.name}: {promise.text}" for report in reports for promise in report.broken]
    run = {"run": describe(options), "parts": [report.as_dict() for report in reports]}
    write_files(chosen, [run], chosen.json)
    for line in broken:
        console.print(f"BROKEN {line}", markup=False, highlight=False)
    console.print(f"{len(reports)} parts, {len(broken)} promises broken")
    return EXIT_BROKEN if broken else 0


def run_part(name: str, options: Options, console: Console) -> PartReport:
    """Run one part; one that cannot be brought to its end is broken as well."""
    began = time.monotonic()
    try:
        report = PARTS[name](options)
    except Exception as problem:
        console.print_exception()
        report = PartReport(name, "The part could not be brought to its end.", problems=[repr(problem)])
        report.promise("the part ends", False, type(problem).__name__)
    report.seconds = time.monotonic() - began
    report.show(console)
    return report


def write_files(chosen: argparse.Namespace, runs: list[dict[str, Any]], figures: Path | None = None) -> None:
    """Write the figures of the run and the document of all runs, where asked."""
    if figures is not None:
        figures.write_text(json.dumps(runs[0], indent=1) + "\n")
    if chosen.markdown is not None:
        chosen.markdown.write_text(document(runs, OPENING.read_text()))


def describe(options: Options) -> dict[str, str]:
    """Where, when and with what the figures were made."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "machine": f"{gpu_name() or processor_name()}, {os.cpu_count()} processors, Python {platform.python_version()}",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": git.stdout.strip() or "unknown",
        "model": "small random GLM (tests/e2e/small_glm.py)" if options.is_small else options.model.name,
        "command": shlex.join(["scripts/reliability.py", *sys.argv[1:]]),
    }


def gpu_name() -> str | None:
    """The first NVIDIA GPU, None where there is none."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return found.splitlines()[0].strip() if found.strip() else None


def read_options(chosen: argparse.Namespace, folder: Path) -> Options:
    """The options of a run; without a model folder a small random model is written."""
    model = chosen.model
    if model is None:
        from tests.e2e.small_glm import write_small_glm

        model = write_small_glm(folder / "model")
    own = {"folder", "model", "is_small", "serve_flags", "stream_counts"}
    same = {one.name: getattr(chosen, one.name) for one in fields(Options) if one.name not in own}
    return Options(
        folder=folder,
        model=model,
        is_small=chosen.model is None,
        serve_flags=tuple(shlex.split(chosen.serve_flags)),
        stream_counts=tuple(map(int, chosen.stream_counts.split(","))),
        **same,
    )


def fault_places(text: str) -> tuple[str, ...]:
    """Places of faults between commas."""
    places = tuple(text.split(","))
    unknown = set(places) - {fault.place for fault in FAULTS}
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no fault at {', '.join(sorted(unknown))}")
    return places


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/reliability.py",
        description="Tries a real glint server hard: soak, fuzzing, overload, faults, slow and idle clients, kill -9. "
        "Prints a table for each part and exits with 1 where a promise does not hold.",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--short", action="store_true", help="the form for CI: minutes in all, and no speed is judged")
    parser.add_argument("--model", type=Path, help="model folder or model id (default: a small random GLM model)")
    parser.add_argument("--serve-flags", default="", help="flags for glint serve, in one text")
    parser.add_argument("--url", help="try the server at this address instead of one of our own")
    parser.add_argument("--seconds", type=float, help="time of the soak and of each load (default: by part)")
    parser.add_argument("--tokens", type=int, help="the soak ends once clients have got so many tokens")
    parser.add_argument("--bodies", type=int, help="fuzzed bodies (default: 100,000; short: 3,000)")
    parser.add_argument("--streams", type=int, help="fuzzed byte streams (default: 20,000; short: 800)")
    parser.add_argument("--concurrency", type=int, help="clients at once (default: by part)")
    parser.add_argument("--stream-counts", default="64,256", help="streams at once of the part streams (64,256)")
    parser.add_argument("--min-tokens-per-second", type=float, help="what the most streams must get together")
    parser.add_argument("--memory-mib", type=float, help="growth of memory that is allowed (default: 16; short: 48)")
    parser.add_argument("--fault-library", type=Path, help="test build of the engine that --serve-flags runs on")
    parser.add_argument("--fault-ranks", type=int, default=2, help="--tp of the rank faults (2)")
    parser.add_argument(
        "--fault-ranks-share-gpu",
        action="store_true",
        help="put all ranks of the rank faults on one GPU; needs NCCL 2.32.3 ($GLINT_NCCL)",
    )
    parser.add_argument(
        "--fault-places",
        type=fault_places,
        default=(),
        metavar="PLACE[,PLACE]",
        help=f"only these faults: {', '.join(fault.place for fault in FAULTS)} (default: all)",
    )
    parser.add_argument("--processes", type=int, help="client processes (default: half of the processors, up to 8)")
    parser.add_argument("--seed", type=int, default=1, help="draws other requests (1)")
    parser.add_argument("--only", type=int, metavar="INDEX", help="fuzz sends this one body and shows its answer")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and the model here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the document of the run, or of --recorded")
    parser.add_argument("--recorded", type=Path, nargs="+", metavar="FILE", help="run nothing: take these --json files")
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part is called {unknown[0]}; choose from {', '.join(PARTS)}")
    return chosen
