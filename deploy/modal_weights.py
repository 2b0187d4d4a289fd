"""The weights of the Modal app: fetched from the hub by one process at a time, compared with it, and recorded.

Nothing here knows Modal.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

SAMPLE = "sample"
LOCK_NAME = ".glint-download"
RECORD_NAME = "glint_download.json"
PROGRESS_SECONDS = 10.0
RETRY_SECONDS = 10.0
MAX_ATTEMPTS = 6
NUM_DOWNLOADS = 16
FORBIDDEN = 403
PASSING_STATUSES = (408, 429)
LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
REFUSALS_OF_DISKS = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS)
Fetched = TypeVar("Fetched")


def model_folder(models: Path, model_id: str) -> Path:
    """The folder that a fetched model is in; refused where it was not fetched."""
    from glint.errors import CheckpointError
    from glint.sample.model import sample_folder

    folder = sample_folder(models / SAMPLE, "fp8") if model_id == SAMPLE else models / model_id
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} holds no model; fetch it first: modal run deploy/modal_app.py::download_model "
            f"--model-id {model_id}"
        )
    return folder


def fetch_model(models: Path, model_id: str, revision: str, owner: str | None = None) -> Path:
    """Bring a model into the folder of models and give its place; what is already there is not fetched again.

    The commit that the revision stood for is recorded beside the weights once all of them are right. `owner` names who
    fetches, across restarts and machines; by default it is this machine.
    """
    from glint.sample.model import make_sample_model

    if model_id == SAMPLE:
        return make_sample_model("fp8", models / SAMPLE)
    folder = models / model_id
    folder.mkdir(parents=True, exist_ok=True)
    with held(models, model_id, owner or socket.gethostname()):
        (folder / RECORD_NAME).unlink(missing_ok=True)
        commit = patiently(f"{model_id} at {revision}", folder, lambda: download(model_id, revision, folder))
        patiently(f"{model_id} at {commit}", folder, lambda: remove_broken_files(model_id, commit, folder))
        record = {"model_id": model_id, "revision": revision, "commit": commit}
        (folder / RECORD_NAME).write_text(json.dumps(record) + "\n")
    print(describe_weights(folder), flush=True)
    return folder


def describe_weights(folder: Path) -> str:
    """One line about which weights a folder holds, from the record of their download."""
    try:
        record = json.loads((folder / RECORD_NAME).read_text())
    except FileNotFoundError:
        return f"weights: {folder}, without a record of a download"
    return f"weights: {record['model_id']} at revision {record['revision']}, commit {record['commit']}"


@contextmanager
def held(models: Path, model_id: str, owner: str) -> Iterator[None]:
    """Hold the folder of a model for one download; refused while another process here, or another owner, has it.

    The lock file names the owner and its process; where the disk has no locks, the names alone keep others out. Who
    ended without letting go is followed by the next of the same owner; others cannot know that it ended, so there a
    person removes the file.
    """
    from glint.errors import CheckpointError

    place = models / model_id / LOCK_NAME
    with place.open("a+") as file:
        is_alone = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_alone = False
        except OSError as problem:
            if problem.errno not in LOCKLESS:
                raise
        file.seek(0)
        holder, _, details = file.read().partition("\n")
        if not is_alone or holder not in ("", owner):
            raise CheckpointError(
                f"{model_id} is being fetched by {holder} ({details}); wait for its end, or where it is gone remove "
                f"{place}: modal volume rm glint-weights {model_id}/{LOCK_NAME}"
            )
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        file.truncate(0)
        file.write(f"{owner}\nprocess {os.getpid()}, since {since}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def patiently(name: str, folder: Path, fetch: Callable[[], Fetched]) -> Fetched:
    """What a call of the hub gives, tried again where the network failed; what no attempt can mend ends at once."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from huggingface_hub.errors import HFValidationError, HTTPError, XetDownloadError

    from glint.errors import CheckpointError

    attempt = 0
    while True:
        attempt += 1
        try:
            return fetch()
        except (HFValidationError, HTTPError, OSError, RuntimeError, XetDownloadError) as problem:
            if is_final(problem):
                raise CheckpointError(
                    f"{name} cannot be fetched, and trying again would not help: {problem}; look at the name of the "
                    "model, at the revision, and at the space on the disk"
                ) from problem
            if attempt == MAX_ATTEMPTS:
                raise CheckpointError(
                    f"{name} could not be fetched whole: {problem}; run download_model again, which goes on with what "
                    f"is in {folder}"
                ) from problem
            print(f"{name}: attempt {attempt} of {MAX_ATTEMPTS} failed: {problem}", flush=True)
            time.sleep(RETRY_SECONDS)


def download(model_id: str, revision: str, folder: Path) -> str:
    """Fetch what is missing of a model, with lines of progress; gives the commit that the revision stands for.

    A broken connection goes on within its file, a new attempt with the files that are not whole: nobody goes on with
    the parts that an attempt leaves.
    """
    from huggingface_hub import HfApi, snapshot_download

    for path in folder.rglob("*.incomplete"):
        path.unlink()
    hub = HfApi()
    commit = str(hub.model_info(model_id, revision=revision).sha)
    files = list(hub.list_repo_tree(model_id, revision=commit, recursive=True))
    total = sum(getattr(file, "size", 0) for file in files)
    with shown_progress(model_id, total, lambda: held_bytes(folder)):
        snapshot_download(model_id, revision=commit, local_dir=folder, max_workers=NUM_DOWNLOADS)
    return commit


def is_final(problem: Exception) -> bool:
    """Whether another attempt would end the same way: a refusal of the hub or of the disk, a name that is none.

    403 of a file is none: its signed address may have run out during a long download, and gets a new one.
    """
    from huggingface_hub.errors import GatedRepoError, HFValidationError

    answer = getattr(problem, "response", None)
    if answer is not None and answer.status_code == FORBIDDEN and "/api/" not in str(answer.url):
        return isinstance(problem, GatedRepoError)
    if answer is not None:
        return 400 <= answer.status_code < 500 and answer.status_code not in PASSING_STATUSES
    return isinstance(problem, HFValidationError) or getattr(problem, "errno", None) in REFUSALS_OF_DISKS


def held_bytes(folder: Path) -> int:
    """Bytes below a folder, those of unfinished files included."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


@contextmanager
def shown_progress(name: str, total_bytes: int, count_bytes: Callable[[], int]) -> Iterator[None]:
    """Print a line about a download at its start, every ten seconds and at its end."""
    begun_at, begun_with, is_over = time.monotonic(), count_bytes(), threading.Event()

    def show() -> None:
        done = min(count_bytes(), total_bytes)
        rate = (done - begun_with) / max(time.monotonic() - begun_at, 1e-3) / 1e6
        share = 100 * done // max(total_bytes, 1)
        print(f"{name}: {done / 1e9:.2f} of {total_bytes / 1e9:.2f} GB, {share}%, {rate:.0f} MB/s", flush=True)

    def repeat() -> None:
        while not is_over.wait(PROGRESS_SECONDS):
            show()

    show()
    watcher = threading.Thread(target=repeat, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()
        show()


def remove_broken_files(model_id: str, commit: str, folder: Path) -> None:
    """Compare the checksum of every file with the hub's; files that differ are removed and named."""
    from huggingface_hub import HfApi

    from glint.errors import CheckpointError

    print(f"{model_id}: comparing checksums with the hub", flush=True)
    found = HfApi().verify_repo_checksums(model_id, revision=commit, local_dir=folder)
    broken = [mismatch["path"] for mismatch in found.mismatches]
    for name in broken:
        (folder / name).unlink()
    if broken or found.missing_paths:
        names = ", ".join([*broken, *found.missing_paths])
        raise CheckpointError(
            f"{folder} lacks files or has files whose checksum is not the hub's, which were removed: {names}; run "
            "download_model again, which fetches only these"
        )
    print(f"{model_id}: {found.checked_count} files have the checksums of the hub", flush=True)
