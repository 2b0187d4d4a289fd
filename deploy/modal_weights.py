"""The weights of the Modal app: fetched by glint's own code, by one process at a time, and recorded.

Nothing here knows Modal.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from glint.checkpoint.hub import ModelId, ModelSource

SAMPLE = "sample"
CACHE_NAME = "hub"
LOCK_NAME = ".glint-download"
RECORD_NAME = "glint_download.json"
RETRY_SECONDS = 10.0
MAX_ATTEMPTS = 6
LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
Fetched = TypeVar("Fetched")


def model_folder(models: Path, model_id: str) -> Path:
    """The folder that a fetched model is in, of the commit that was fetched last; refused where it was not fetched."""
    from glint.checkpoint.snapshot import Snapshot
    from glint.errors import CheckpointError
    from glint.sample.model import sample_folder

    if model_id == SAMPLE:
        folder = sample_folder(models / SAMPLE, "fp8")
        is_whole = (folder / "config.json").is_file()
    else:
        commit = read_record(models, model_id).get("commit", "")
        snapshot = Snapshot.open(model_id, commit, models / CACHE_NAME)
        folder, is_whole = snapshot.folder, bool(commit) and snapshot.is_whole()
    if not is_whole:
        raise CheckpointError(
            f"{folder} holds no model; fetch it first: modal run deploy/modal_app.py::download_model "
            f"--model-id {model_id}"
        )
    return folder


def fetch_model(models: Path, model_id: str, revision: str, owner: str | None = None) -> Path:
    """Bring a model into the cache of models and give its place; what is already there is only compared again.

    The commit that the revision stood for is recorded once all of it is right. `owner` names who fetches, across
    restarts and machines; by default it is this machine.
    """
    from glint.checkpoint import hub
    from glint.sample.model import make_sample_model

    if model_id == SAMPLE:
        return make_sample_model("fp8", models / SAMPLE)
    place = models / model_id
    place.mkdir(parents=True, exist_ok=True)
    asked = hub.ModelId(model_id, revision)
    with held(models, model_id, owner or socket.gethostname()):
        (place / RECORD_NAME).unlink(missing_ok=True)
        source = patiently(f"{model_id} at {revision}", lambda: fetch_again(asked, models / CACHE_NAME))
        record = {"model_id": model_id, "revision": revision, "commit": source.commit}
        (place / RECORD_NAME).write_text(json.dumps(record) + "\n")
    print(describe_weights(models, model_id), flush=True)
    return source.folder


def fetch_again(model_id: ModelId, cache: Path) -> ModelSource:
    """Fetch what is missing, and compare all of it with the hub's hashes, also what was found whole before."""
    from glint.checkpoint import hub

    return hub.fetch_model(model_id, lambda line: print(line, flush=True), cache, is_renewed=True)


def read_record(models: Path, model_id: str) -> dict[str, str]:
    """What the last download of a model recorded; nothing where there was none."""
    try:
        return dict(json.loads((models / model_id / RECORD_NAME).read_text()))
    except FileNotFoundError:
        return {}


def describe_weights(models: Path, model_id: str) -> str:
    """One line about which weights a model has, from the record of their download."""
    record = read_record(models, model_id)
    if not record:
        return f"weights: {model_id}, without a record of a download"
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


def patiently(name: str, fetch: Callable[[], Fetched]) -> Fetched:
    """What a call of the hub gives, tried again where the network or the hub failed; a refusal ends at once."""
    from glint.checkpoint.hub import HubUnreachable
    from glint.errors import CheckpointError

    for attempt in range(1, MAX_ATTEMPTS):
        try:
            return fetch()
        except HubUnreachable as problem:
            print(f"{name}: attempt {attempt} of {MAX_ATTEMPTS} failed: {problem}", flush=True)
            time.sleep(RETRY_SECONDS)
    try:
        return fetch()
    except HubUnreachable as problem:
        raise CheckpointError(
            f"{name} could not be fetched whole in {MAX_ATTEMPTS} attempts: {problem}; run download_model again, which "
            "goes on with the files that are whole"
        ) from problem
