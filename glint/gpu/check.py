"""`glint check --gpu`: what the machine's GPUs are and would run, and a self-test of the CUDA engine."""

import sys
import time
from ctypes import CDLL
from pathlib import Path

import numpy as np

from glint.checkpoint.table import NATIVE_TENSOR
from glint.engine.args import EngineArgs, Kernels
from glint.engine.native_options import kernels_name, native_options
from glint.engine.settings import EngineSettings
from glint.gpu.self_test import SMALL, Libraries, Row, models_for, run_self_test
from glint.native import abi
from glint.native.library import NativeEngine, choose_library, describe_device, open_library
from glint.terminal import say

READ_BYTES = 2**30
SYNTHETIC_SEED = 1
LABEL_WIDTH = 20
MODEL_WIDTH = 47
CHECK_WIDTH = 46
WAY_OUT = (
    "do not serve with this GPU and library: build the library anew (scripts/build.sh --cuda), try --kernels portable, "
    "and report these lines"
)


def run(engine: Path | None, kernels: Kernels | None) -> int:
    """Print the GPUs and run the self-test; 1 where a GPU cannot be used or a check fails."""
    path = choose_library("cuda", engine)
    library = open_library("cuda", path)
    settings = check_settings(kernels)
    number = native_options(settings, SMALL, ()).kernels
    num_devices = describe_device(library, 0, number).num_devices
    for index in range(num_devices):
        print_lines(f"GPU {index}", describe(describe_device(library, index, number), index))
    bandwidth = measure_bandwidth(library, settings)
    print_lines("GPU 0, measured", {"read bandwidth": f"{bandwidth / 1e9:,.0f} GB/s"})
    beside = path.parent / "libglint_cpu.so"
    cpu = open_library("cpu", beside if beside.is_file() else None)
    return report(Libraries(library, "cuda", settings.kernels, cpu), num_devices)


def check_settings(kernels: Kernels | None) -> EngineSettings:
    """Settings of a small engine; kernels that no GPU has are refused."""
    args = EngineArgs(device="cuda", kernels=kernels, num_pages=64, max_num_seqs=1, max_step_tokens=64)
    return EngineSettings.resolve("check", SMALL, args)


def describe(device: abi.Device, index: int) -> dict[str, str]:
    """What a GPU is and would run, by label."""
    others = [other for other in range(device.num_devices) if other != index]
    reached = [other for other in others if device.peers >> other & 1]
    driver = device.driver.decode()
    return {
        "device": device.name.decode(),
        "compute capability": f"{device.compute_major}.{device.compute_minor}",
        "driver": f"{driver + ', ' if driver else ''}supports CUDA {cuda_version(device.driver_version)}",
        "runtime": f"CUDA {cuda_version(device.runtime_version)}",
        "kernels": f"{kernels_name(device.kernels)}: {device.kernels_reason.decode()}",
        "code": device.code.decode(),
        "multiprocessors": str(device.num_multiprocessors),
        "shared memory": f"{device.shared_bytes / 1024:.0f} KiB for a thread block",
        "memory": f"{device.memory_total / 1e9:.1f} GB, {device.memory_free / 1e9:.1f} GB free",
        "peer access": describe_peers(others, reached),
        "NCCL": device.nccl.decode(),
    }


def describe_peers(others: list[int], reached: list[int]) -> str:
    """Which GPUs' memory a GPU reaches."""
    if not others:
        return "no other GPU is visible"
    if reached == others:
        return "reaches every other GPU"
    missing = ", ".join(str(other) for other in others if other not in reached)
    return f"does not reach GPU {missing}: sums of small steps go through NCCL"


def cuda_version(number: int) -> str:
    """A version as CUDA numbers it, as text."""
    return f"{number // 1000}.{number % 1000 // 10}"


def print_lines(title: str, lines: dict[str, str]) -> None:
    """Print labels and texts under a title."""
    print(title)
    for label, text in lines.items():
        print(f"  {label:<{LABEL_WIDTH}}{text}")
    sys.stdout.flush()


def measure_bandwidth(library: CDLL, settings: EngineSettings) -> float:
    """Read bandwidth of GPU 0 in bytes per second."""
    options = native_options(settings, SMALL, ())
    options.synthetic_seed = SYNTHETIC_SEED
    with NativeEngine(library, options, np.zeros(0, NATIVE_TENSOR)) as native:
        return native.measure_read(READ_BYTES)


def report(libraries: Libraries, num_devices: int) -> int:
    """Run the self-test and print every row as it comes; 1 where one failed."""
    started = time.monotonic()
    print("Self-test against the CPU")
    rows = []
    for row in run_self_test(libraries, say, models_for(num_devices)):
        rows.append(row)
        print_row(row)
    failed = sum(not row.has_passed for row in rows)
    seconds = time.monotonic() - started
    if failed:
        print(f"self-test: {failed} of {len(rows)} checks failed in {seconds:.0f} s; {WAY_OUT}")
        return 1
    print(f"self-test: {len(rows)} checks passed in {seconds:.0f} s")
    return 0


def print_row(row: Row) -> None:
    """Print a row of the self-test."""
    outcome = "passed" if row.has_passed else "FAILED"
    print(
        f"  {outcome}  {row.model:<{MODEL_WIDTH}}{row.check:<{CHECK_WIDTH}}{row.value:>11}  {row.bound}".rstrip(),
        flush=True,
    )
