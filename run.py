#!/usr/bin/env python3
"""Entry point of a glint checkout: prepares everything on first use, then runs glint.

The first start makes a virtual environment in .venv, installs the requirements of pyproject.toml into it and builds
build/libglint_cpu.so, showing what it does; with --device cuda, or with --prepare where a GPU is, also
build/libglint_cuda.so. Later starts find all that unchanged and go straight to the work.
Only the standard library is used here, so any Python can say what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import difflib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
VENV_STAMP = VENV / "glint-requirements.json"
BUILD = ROOT / "build"
BUILD_STAMPS = {"cpu": BUILD / "glint-sources.sha256", "cuda": BUILD / "glint-cuda-sources.sha256"}
LIBRARIES = {"cpu": BUILD / "libglint_cpu.so", "cuda": BUILD / "libglint_cuda.so"}
TEST_LIBRARIES = {"cpu": BUILD / "libglint_cpu_test.so", "cuda": BUILD / "libglint_cuda_test.so"}
TEST_EXTRA = "test"
CUDA_DRIVER = "libcuda.so.1"
OLDEST_PYTHON = (3, 11)
OLDEST_CMAKE = (3, 20)
EXIT_REFUSED = 2
COMMANDS = ("serve", "generate", "chat", "batch", "check", "download", "sample-model", "bench", "smoke")
SHARED_FLAGS = ("model", "engine", "threads", "kernels", "tp", "expert-layout")
WITHOUT_NETWORK = """\
This needs PyPI. Where there is no network, set PIP_INDEX_URL to a mirror, or PIP_FIND_LINKS to a folder of wheels
(with PIP_NO_INDEX=1), and start again"""

DESCRIPTION = """\
Runs glint from a checkout. The first start makes .venv, installs what is needed and builds the engine;
later starts begin at once.

  ./run.py --smoke                     five prompts through the CPU engine, checked; the place to begin
  ./run.py --smoke --model DIR         the same with your own GLM-4.x MoE checkpoint
  ./run.py --smoke --device cuda       the same on an NVIDIA GPU; builds the CUDA engine first, which needs nvcc
  ./run.py --serve                     the OpenAI and Anthropic APIs on http://127.0.0.1:8000
  ./run.py --bench                     a server under load for a minute: throughput and latencies
  ./run.py chat                        talk with the sample model; the same as 'glint chat'
  ./run.py COMMAND                     any glint command:
                                       serve, generate, chat, batch, check, download, sample-model, bench, smoke
  ./run.py generate --help             what such a command takes
"""


class PrepareError(Exception):
    """Something this machine lacks, or a value that cannot be used; the text names it and the way out."""


def say(text: str) -> None:
    """Prints one line of progress on standard error."""
    print(f"[run.py] {text}", file=sys.stderr, flush=True)


def call(
    command: Sequence[str | Path], purpose: str, environment: dict[str, str] | None = None, way_out: str | None = None
) -> None:
    """Runs a command with its output on standard error; raises PrepareError naming the purpose if it fails."""
    words = [str(part) for part in command]
    try:
        result = subprocess.run(words, stdout=sys.stderr, env=environment, check=False)
    except OSError as problem:
        reason = f"{purpose} needs '{words[0]}', which cannot be started: {problem.strerror}"
        raise PrepareError(f"{reason}; install it or put it on the PATH, then start again") from None
    if result.returncode != 0:
        reason = f"{purpose} failed with exit code {result.returncode}; the command was:\n  {' '.join(words)}"
        raise PrepareError(reason if way_out is None else f"{reason}\n{way_out}")


@contextlib.contextmanager
def timed(stage: str, seconds: dict[str, float]) -> Iterator[None]:
    """Adds the time of a block to what its stage took before."""
    started = time.monotonic()
    yield
    seconds[stage] = seconds.get(stage, 0.0) + time.monotonic() - started


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Holds the lock of this checkout, so that two first starts do not build over each other."""
    with (ROOT / ".prepare.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another start is preparing this checkout; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_python_version() -> None:
    """Refuses a Python that is too old for glint."""
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(str(part) for part in sys.version_info[:3])
        needed = ".".join(str(part) for part in OLDEST_PYTHON)
        raise PrepareError(
            f"Python {found} ({sys.executable}) is too old: glint needs {needed} or newer.\n"
            f"Install it (Debian, Ubuntu: sudo apt install python{needed} python{needed}-venv) "
            f"and start with: python{needed} run.py"
        )


def check_venv_module() -> None:
    """Refuses a Python that cannot make virtual environments, as Debian's is without a package of its own."""
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
            raise PrepareError(
                f"Python ({sys.executable}) has no module '{module}', which makes virtual environments.\n"
                f"Install it (Debian, Ubuntu: sudo apt install {package}) and start again"
            )


def requirements(extras: Sequence[str]) -> list[str]:
    """The requirements of pyproject.toml, with those of the named extras."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = project.get("optional-dependencies", {})
    wanted = list(project["dependencies"])
    for extra in extras:
        if extra not in known:
            raise PrepareError(f"pyproject.toml has no extra '{extra}'; it has: {', '.join(sorted(known))}")
        wanted += known[extra]
    return sorted(set(wanted))


def venv_identity() -> dict[str, str]:
    """What makes .venv usable: the interpreter behind it and the place of this checkout."""
    return {"python": str(VENV_PYTHON.resolve()), "root": str(ROOT)}


def stamped_requirements() -> list[str]:
    """What .venv was last completed with; empty if it is absent, unfinished, damaged, moved or of another Python."""
    if not VENV_PYTHON.exists() or not VENV_STAMP.exists():
        return []
    try:
        stamp = json.loads(VENV_STAMP.read_text())
        return list(stamp["requirements"]) if stamp["identity"] == venv_identity() else []
    except (ValueError, KeyError, TypeError):
        return []


def lock_flags() -> list[str]:
    """The flags that hold pip to the versions which scripts/lock.sh recorded for this version of Python, if it did."""
    lock = ROOT / f"requirements-{sys.version_info[0]}.{sys.version_info[1]}.lock"
    return ["--constraint", str(lock)] if lock.exists() else []


def install(missing: Sequence[str], seconds: dict[str, float]) -> None:
    """Downloads the missing requirements and all they need, then installs them into .venv without the network."""
    pip = [str(VENV_PYTHON), "-m", "pip", "--disable-pip-version-check"]
    say(f"downloading {len(missing)} requirements and what they need: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="glint-wheels-") as folder:
        with timed("downloads", seconds):
            wheel = [*pip, "wheel", "--wheel-dir", folder, *lock_flags(), *missing]
            call(wheel, "downloading requirements", way_out=WITHOUT_NETWORK)
        wheels = sorted(str(path) for path in Path(folder).iterdir())
        say(f"installing {len(wheels)} packages")
        with timed("installation", seconds):
            offline = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
            call([*pip, *offline, *wheels], "installing requirements")


def prepare_environment(wanted: Sequence[str], seconds: dict[str, float]) -> None:
    """Makes .venv hold the wanted requirements and see this checkout; does nothing if it already does.

    A .venv that was complete stays in use if the installation of more fails.
    """
    present = stamped_requirements()
    missing = [line for line in wanted if line not in present]
    if present and not missing:
        return
    if not present:
        check_venv_module()
        say(f"making a virtual environment in {VENV}")
        with timed("installation", seconds):
            call([sys.executable, "-m", "venv", "--clear", VENV], "making the virtual environment")
    install(missing, seconds)
    packages = next((VENV / "lib").glob("python3.*/site-packages"))
    (packages / "glint-checkout.pth").write_text(f"{ROOT}\n")
    everything = sorted({*present, *missing})
    unfinished = VENV_STAMP.with_suffix(".new")
    unfinished.write_text(json.dumps({"identity": venv_identity(), "requirements": everything}, indent=1))
    unfinished.replace(VENV_STAMP)


def sources_digest(device: str) -> str:
    """A hash over the names and bytes of everything that the native library of a device is built from."""
    digest = hashlib.sha256(os.environ.get("CXX", "").encode())
    folders = [ROOT / "native"] if device == "cpu" else [ROOT / "native", ROOT / "cmake"]
    for path in [ROOT / "CMakeLists.txt", *sorted(path for folder in folders for path in folder.rglob("*"))]:
        is_cuda = (ROOT / "native" / "cuda") in path.parents
        if path.suffix in {".txt", ".cmake", ".cpp", ".h", ".cu", ".cuh"} and (device == "cuda" or not is_cuda):
            digest.update(f"{path.relative_to(ROOT)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def system_cmake_is_recent() -> bool:
    """Whether the cmake on the PATH is recent enough for CMakeLists.txt."""
    cmake = shutil.which("cmake")
    if cmake is None:
        return False
    answer = subprocess.run([cmake, "-E", "capabilities"], capture_output=True, check=False)
    if answer.returncode != 0:
        return False
    version = json.loads(answer.stdout)["version"]
    return (version["major"], version["minor"]) >= OLDEST_CMAKE


def build_tools() -> list[str]:
    """The build tools this machine lacks and PyPI has."""
    tools = [] if system_cmake_is_recent() else ["cmake>=3.20,<5"]
    return tools if shutil.which("ninja") or shutil.which("make") else [*tools, "ninja>=1.10,<2"]


def build_is_current(device: str, for_tests: bool = False) -> bool:
    """Whether the library of a device, and its test build if wanted, are of exactly the sources that are here now."""
    stamp = BUILD_STAMPS[device]
    libraries = [LIBRARIES[device], *([TEST_LIBRARIES[device]] if for_tests else [])]
    is_built = all(library.exists() for library in libraries)
    return is_built and stamp.exists() and stamp.read_text() == sources_digest(device)


def build_script(device: str, for_tests: bool = False) -> list[str | Path]:
    """The command that builds the library of a device; the one for CUDA builds both."""
    flags = [*(["--cuda"] if device == "cuda" else []), *(["--tests"] if for_tests else [])]
    return ["bash", ROOT / "scripts" / "build.sh", *flags]


def build_library(device: str, for_tests: bool) -> None:
    """Builds the library of a device through scripts/build.sh; the tools of .venv come first on its PATH."""
    digests = {name: sources_digest(name) for name in (["cpu", "cuda"] if device == "cuda" else ["cpu"])}
    for name in digests:
        BUILD_STAMPS[name].unlink(missing_ok=True)
    say(f"building build/{LIBRARIES[device].name}")
    environment = {**os.environ, "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    call(build_script(device, for_tests), "building the native library", environment)
    for name, digest in digests.items():
        BUILD_STAMPS[name].write_text(digest)


def cuda_problem() -> str | None:
    """Why CUDA cannot compute on this machine, by its own driver; None if it can."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return f"no NVIDIA driver is installed ({CUDA_DRIVER} was not found)"
    code, count = driver.cuInit(0), ctypes.c_int()
    if code == 0:
        code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code != 0:
        return f"the NVIDIA driver finds no GPU it can use (CUDA error {code}; nvidia-smi may say more)"
    return None if count.value > 0 else "the NVIDIA driver finds no GPU"


def has_gpu() -> bool:
    """Whether CUDA can compute on this machine."""
    return cuda_problem() is None


def check_gpu() -> None:
    """Refuses to build the CUDA engine for a run on a machine that could not start it, minutes later."""
    problem = cuda_problem()
    if problem is not None:
        raise PrepareError(
            f"this needs an NVIDIA GPU (device cuda): {problem}.\n"
            "Commands that take --device compute on the CPU without it; './run.py --prepare --device cuda' builds the "
            "CUDA engine here all the same, for another machine"
        )


def prepared_device(asked: str | None) -> str:
    """What --prepare builds for: the device that was asked for, else CUDA where a GPU and nvcc are."""
    if asked is not None:
        return asked
    if has_gpu() and not find_nvcc():
        say("a GPU is here, but no nvcc: only the CPU engine is built; --prepare --device cuda says what is missing")
    return "cuda" if has_gpu() and find_nvcc() else "cpu"


def find_nvcc() -> bool:
    """Whether scripts/build.sh finds the CUDA compiler."""
    return subprocess.run([*build_script("cuda"), "--check"], capture_output=True, check=False).returncode == 0


def device_extras(extras: Sequence[str], device: str | None) -> list[str]:
    """The extras that were asked for, and those that a device needs: on GPUs NCCL."""
    return [*extras, *(["cuda"] if device == "cuda" and "cuda" not in extras else [])]


def prepare(extras: Sequence[str], device: str | None) -> None:
    """Brings .venv and the library of a device up to date with this checkout, with visible progress.

    Without a device no library is needed; the extra for tests brings the test build of the library too.
    """
    seconds: dict[str, float] = {}
    for_tests = TEST_EXTRA in extras
    with one_at_a_time():
        must_build = device is not None and not build_is_current(device, for_tests)
        if device is not None and must_build:
            call([*build_script(device), "--check"], "looking for the compilers")
        wanted = requirements(device_extras(extras, device))
        prepare_environment([*wanted, *build_tools()] if must_build else wanted, seconds)
        if device is not None and must_build:
            with timed("build", seconds):
                build_library(device, for_tests)
        if seconds:
            parts = ", ".join(f"{stage} {taken:.0f} s" for stage, taken in seconds.items())
            say(f"ready after {sum(seconds.values()):.0f} s: {parts}")


def make_parser() -> argparse.ArgumentParser:
    """The flags of this script, each with what it does and its default."""
    parser = argparse.ArgumentParser(
        prog="run.py",
        usage="run.py (--smoke | --bench | --serve | --prepare | COMMAND) [flags]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--smoke", action="store_true", help="run five prompts greedily, check everything, print speed")
    action.add_argument("--bench", action="store_true", help="run 'glint bench serve'; its own flags may follow")
    action.add_argument("--serve", action="store_true", help="run 'glint serve'; its own flags may follow")
    action.add_argument("--prepare", action="store_true", help="only make .venv and build, then stop")
    parser.add_argument("--model", metavar="MODEL", help="checkpoint folder or model id (default: the sample model)")
    parser.add_argument("--engine", metavar="FILE", help="native library (default: that of --device, built here)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="where to run, or what to prepare (default: cpu)")
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads (default: one per core)")
    parser.add_argument("--kernels", metavar="NAME", help="kernel set (default: auto); 'generate --help' names them")
    parser.add_argument("--tp", metavar="N", help="ranks, GPUs with --device cuda, that share the model (default: 1)")
    parser.add_argument("--expert-layout", metavar="NAME", help="tp: ranks have slices of experts; ep: whole experts")
    parser.add_argument("--extra", metavar="NAME", action="append", default=[], help="with --prepare: also this extra")
    return parser


def flag_value(chosen: argparse.Namespace, flag: str) -> object:
    """What a flag of this script was given; None where it was left out."""
    return getattr(chosen, flag.replace("-", "_"))


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Reads the command line; flags that only the server or the bench know are handed on as they are."""
    parser = make_parser()
    chosen, rest = parser.parse_known_args(arguments)
    if rest and not (chosen.bench or chosen.serve):
        flags = [flag for flag in parser.format_help().split() if flag.startswith("--")]
        near = difflib.get_close_matches(rest[0], flags, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        parser.error(f"unknown: {' '.join(rest)}{hint} './run.py --help' lists every flag")
    if not (chosen.smoke or chosen.bench or chosen.serve or chosen.prepare):
        parser.error("say what to run: --smoke is the place to begin; './run.py --help' lists everything")
    given = [f"--{name}" for name in SHARED_FLAGS if flag_value(chosen, name) is not None]
    if chosen.prepare and given:
        parser.error(f"--prepare runs no model and takes no {given[0]}: leave {given[0]} out")
    if chosen.extra and not chosen.prepare:
        parser.error(f"--extra {chosen.extra[0]} goes with --prepare only: run './run.py --prepare' with it first")
    return chosen, rest


def refuse(text: str) -> int:
    """Says why something is not done; returns the exit code for it."""
    print(f"run.py: {text}", file=sys.stderr)
    return EXIT_REFUSED


def refuse_command(name: str) -> int:
    """Says that glint has no such command, with the one that was perhaps meant; returns the exit code for it."""
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ";"
    return refuse(f"unknown command '{name}'{hint} the commands are: {', '.join(COMMANDS)}")


def needed_build(arguments: Sequence[str]) -> str | None:
    """Checks a glint command line by glint's own parser; gives the device whose library, built here, it uses.

    So --help is answered and a wrong flag, model folder, thread count or engine is refused before anything is prepared.
    """
    sys.path.insert(0, str(ROOT))
    from glint.checkpoint.hub import read_model_id
    from glint.cli import make_parser
    from glint.errors import GlintError

    chosen = vars(make_parser().parse_args(arguments))
    if chosen.get("url") is not None:
        return None
    model, threads, engine, device = (chosen.get(name) for name in ("model", "threads", "engine", "device"))
    if isinstance(model, Path):
        try:
            read_model_id(model)
        except GlintError as problem:
            raise PrepareError(f"--model {problem}") from problem
    if threads is not None and threads < 1:
        raise PrepareError(f"--threads {threads} is not at least 1; leave it out for one per core")
    if "engine" not in chosen or device is None:
        return None
    library = LIBRARIES[device]
    if engine is not None and engine.resolve() != library and not engine.is_file():
        raise PrepareError(f"--engine {engine} is not a file; leave it out to build and use {library}")
    return str(device) if engine is None or engine.resolve() == library else None


def glint_flags(chosen: argparse.Namespace) -> list[str]:
    """The flags that smoke, bench and serve share, for glint's own command line."""
    library = LIBRARIES[chosen.device or "cpu"]
    flags = ["--engine", str(library if chosen.engine is None else chosen.engine)]
    for name in ("device", *(name for name in SHARED_FLAGS if name != "engine")):
        value = flag_value(chosen, name)
        flags += [] if value is None else [f"--{name}", str(value)]
    return flags


def start_glint(arguments: Sequence[str]) -> NoReturn:
    """Prepares what the glint command line needs, then replaces this process by glint."""
    device = needed_build(arguments)
    if device == "cuda" and not build_is_current(device):
        check_gpu()
    prepare([], device)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(VENV_PYTHON, [str(VENV_PYTHON), "-P", "-m", "glint", *arguments])


def run(arguments: Sequence[str]) -> int:
    """Does what the command line asks for; returns the exit code."""
    check_python_version()
    if arguments and not arguments[0].startswith("-"):
        if arguments[0] not in COMMANDS:
            return refuse_command(arguments[0])
        start_glint(arguments)
    chosen, rest = parse(arguments)
    if chosen.smoke:
        start_glint(["smoke", *glint_flags(chosen)])
    if chosen.bench:
        start_glint(["bench", "serve", *glint_flags(chosen), *rest])
    if chosen.serve:
        start_glint(["serve", *glint_flags(chosen), *rest])
    prepare(chosen.extra, prepared_device(chosen.device))
    return 0


def main() -> int:
    """Runs the command line; what is missing or unusable is one message and exit code 1, Ctrl-C is 130."""
    try:
        return run(sys.argv[1:])
    except PrepareError as problem:
        print(f"run.py: {problem}", file=sys.stderr)
        return 1
    except OSError as problem:
        print(f"run.py: {problem}; the checkout in {ROOT} must be writable and have free space", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nrun.py: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
