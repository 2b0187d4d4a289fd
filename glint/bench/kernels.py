"""`glint bench kernels`: every CUDA operation at the shapes of a rank, by the check programs of the CUDA build."""

import argparse
import subprocess
import sys
from pathlib import Path

from glint.errors import EngineError, RequestError

PROGRAMS = (
    ("products_check", "dense_speed"),
    ("products_check", "experts_speed"),
    ("step_check", "all"),
)


def run(chosen: argparse.Namespace) -> int:
    """Runs the programs one after the other with their output as it comes; the exit code is 1 if one failed."""
    if chosen.device != "cuda":
        raise RequestError("--device cpu has no bench of single kernels: 'glint bench cpu' measures the CPU engine")
    folder = Path(__file__).resolve().parents[2] / "build" if chosen.build_dir is None else chosen.build_dir
    for name in dict.fromkeys(name for name, _ in PROGRAMS):
        if not (folder / name).is_file():
            raise EngineError(
                f"{folder / name} is not there; build the check programs with scripts/build.sh --cuda, or name the "
                "folder that has them with --build-dir"
            )
    failed = [f"{name} {part}" for name, part in PROGRAMS if not run_program(folder / name, part)]
    for program in failed:
        print(f"glint: {program} failed; its output above says where", file=sys.stderr)
    return 1 if failed else 0


def run_program(program: Path, part: str) -> bool:
    """Runs one part of a check program; gives whether it succeeded."""
    print(f"== {program.name} {part} ==", flush=True)
    try:
        return subprocess.run([str(program.resolve()), part], check=False).returncode == 0
    except OSError as problem:
        raise EngineError(
            f"{program} cannot be started: {problem.strerror}; build it here with scripts/build.sh --cuda"
        ) from problem
