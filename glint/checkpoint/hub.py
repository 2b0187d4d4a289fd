"""Model ids: `owner/name[@revision]` of the Hugging Face hub, fetched into huggingface_hub's own cache.

The library itself honours HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE, goes on with a broken connection and
compares sizes. This module adds what it does not do: exactly the files that a model needs, the free space before the
first byte, hashes, and a record of what was found whole. Only what is recorded is used without looking again.
"""

import errno
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glint.checkpoint.snapshot import DEFAULT_REVISION, HubFile, Snapshot
from glint.errors import CheckpointError

Say = Callable[[str], None]

MODEL_ID = "owner/name[@revision]"
NUM_DOWNLOADS = 8
MAX_ID_CHARS = 96
PASSING_STATUSES = (408, 429)
FORBIDDEN = 403
REFUSED_STATUSES = (401, FORBIDDEN)
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"{_NAME}/{_NAME}")
_REVISION = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_./-]*[A-Za-z0-9_])?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubUnreachable(CheckpointError):
    """The hub cannot be reached or has a failure of its own: the same may go well later."""


@dataclass(frozen=True)
class ModelId:
    """A model of the hub; without a revision its main branch."""

    repository: str
    revision: str = DEFAULT_REVISION

    def __str__(self) -> str:
        return self.repository if self.revision == DEFAULT_REVISION else f"{self.repository}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None


@dataclass(frozen=True)
class ModelSource:
    """A model folder, and the repository and commit of the hub that it is, where it came by its id."""

    folder: Path
    repository: str | None = None
    commit: str | None = None

    @property
    def name(self) -> str:
        """What the model is called: its repository, else the name of its folder."""
        return self.repository or self.folder.resolve().name or "model"

    @property
    def pinned_id(self) -> str | None:
        """The id of exactly this commit; None for a folder."""
        return None if self.repository is None else f"{self.repository}@{self.commit}"


def print_line(text: str) -> None:
    """Say something about a download on standard error."""
    print(f"glint: {text}", file=sys.stderr, flush=True)


def read_model_id(model: str | Path) -> ModelId | None:
    """The id that a user gave in the place of a model folder; None where the folder exists, which always wins."""
    text = str(model)
    try:
        place = Path(text).expanduser()
        if place.is_dir():
            return None
        is_file = place.exists()
    except (OSError, RuntimeError) as problem:
        raise CheckpointError(f"the model folder {text} cannot be looked at: {problem}") from problem
    if is_file:
        raise CheckpointError(f"{text} is a file; give the model folder that it lies in, or a model id, {MODEL_ID}")
    repository, at, revision = text.partition("@")
    if not _REPOSITORY.fullmatch(repository) or "--" in repository or ".." in repository:
        raise CheckpointError(
            f"{text} is not a folder, and not a model id either; give a folder with config.json and safetensors files, "
            f"or {MODEL_ID} such as zai-org/GLM-4.7-FP8"
        )
    if len(repository) > MAX_ID_CHARS:
        raise CheckpointError(
            f"the model id {repository} has {len(repository)} characters, the hub has at most {MAX_ID_CHARS}"
        )
    if at and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise CheckpointError(
            f"{text} names no revision after its @; give a branch, a tag or a commit there, or leave the @ out for "
            f"{DEFAULT_REVISION}"
        )
    return ModelId(repository, revision) if at else ModelId(repository)


def locate_model(model: str | Path, say: Say = print_line) -> ModelSource:
    """The folder of a model that is given as a folder or as an id; a model id is fetched where the cache lacks it."""
    model_id = read_model_id(model)
    return ModelSource(Path(model).expanduser()) if model_id is None else fetch_model(model_id, say)


def fetch_model(
    model_id: ModelId, say: Say = print_line, cache: Path | None = None, is_renewed: bool = False
) -> ModelSource:
    """Bring a model into the cache, whole and compared with the hub's hashes, and give its folder.

    A pinned id that is whole needs no network. Otherwise the hub says which commit the revision is now; where it cannot
    be reached, or HF_HUB_OFFLINE forbids to ask, the commit that the cache knows is used. One process fetches at a
    time; the others wait for it. If `is_renewed`, the hub must be reached, and all files are compared, also those that
    were whole before.
    """
    with named_errors(model_id):
        commit, is_online = find_commit(model_id, say, cache, may_be_known=not is_renewed)
        snapshot = Snapshot.open(model_id.repository, commit, cache)
        if is_renewed or not snapshot.is_whole():
            with snapshot.alone(lambda: say(f"another process fetches {model_id.repository}; waiting for it")):
                if is_renewed or not snapshot.is_whole():
                    with snapshot.leaving_no_parts():
                        _complete(model_id, snapshot, is_online, say)
        snapshot.remember(model_id.revision)
    return ModelSource(snapshot.folder, model_id.repository, commit)


def find_cached(model_id: ModelId) -> ModelSource | None:
    """The model as the cache has it, whole, without asking the hub; None where it is not there."""
    commit = model_id.revision if model_id.is_pinned else Snapshot.known_commit(model_id.repository, model_id.revision)
    if commit is None:
        return None
    snapshot = Snapshot.open(model_id.repository, commit)
    return ModelSource(snapshot.folder, model_id.repository, commit) if snapshot.is_whole() else None


def ask_commit(model_id: ModelId) -> str:
    """The commit that the hub has under a revision."""
    from huggingface_hub import HfApi

    commit = HfApi().model_info(model_id.repository, revision=model_id.revision).sha
    if commit is None or _COMMIT.fullmatch(commit) is None:
        raise CheckpointError(
            f"the hub gives {commit!r} as the commit of {model_id}, which is none; look at HF_ENDPOINT"
        )
    return commit


def ask_files(repository: str, commit: str) -> dict[str, HubFile]:
    """The files at the top of a repository, with their sizes and hashes."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    entries = HfApi().list_repo_tree(repository, revision=commit)
    return {
        entry.path: HubFile(entry.path, entry.size, entry.blob_id if entry.lfs is None else entry.lfs.sha256)
        for entry in entries
        if isinstance(entry, RepoFile)
    }


def find_commit(model_id: ModelId, say: Say, cache: Path | None = None, may_be_known: bool = True) -> tuple[str, bool]:
    """The commit of a revision, and whether the hub may be asked for its files.

    Where the hub cannot be reached, the commit that the cache has whole is given if it `may_be_known`.
    """
    from huggingface_hub import is_offline_mode

    if model_id.is_pinned:
        return model_id.revision, not is_offline_mode()
    known = Snapshot.known_commit(model_id.repository, model_id.revision, cache)
    if is_offline_mode():
        if known is None:
            raise CheckpointError(_offline_advice(model_id, "is not in the cache"))
        return known, False
    try:
        with named_errors(model_id):
            return ask_commit(model_id), True
    except HubUnreachable as problem:
        if not may_be_known or known is None or not Snapshot.open(model_id.repository, known, cache).is_whole():
            raise
        say(f"{problem}; the cache has commit {known} of {model_id}, which is used")
        return known, False


def _complete(model_id: ModelId, snapshot: Snapshot, is_online: bool, say: Say) -> None:
    """Fetch what a snapshot lacks, compare all of it with the hashes, and record it; offline, nothing is fetched."""
    if is_online:
        snapshot.remove_leftovers()
        files = ask_files(model_id.repository, snapshot.commit)
        needed = snapshot.choose_files(files)
        snapshot.check_space(needed)
    else:
        if not snapshot.folder.is_dir():
            raise CheckpointError(_offline_advice(model_id, "is not in the cache"))
        try:
            needed = snapshot.choose_files(snapshot.list_present())
        except CheckpointError as problem:
            raise CheckpointError(_offline_advice(model_id, f"is not whole in the cache ({problem})")) from problem
    snapshot.complete(needed, NUM_DOWNLOADS, say)


def _offline_advice(model_id: ModelId, state: str) -> str:
    return (
        f"{model_id} {state}, and HF_HUB_OFFLINE is set, so nothing is fetched: unset it, or run 'glint download "
        f"{model_id}' where there is network and bring the cache folder (HF_HOME), or give a model folder"
    )


@contextmanager
def named_errors(model_id: ModelId) -> Iterator[None]:
    """Turn what huggingface_hub raises into one sentence that names the model and the way out."""
    from huggingface_hub.errors import HFValidationError, HTTPError, XetDownloadError

    try:
        yield
    except CheckpointError:
        raise
    except (HFValidationError, HTTPError, OSError, RuntimeError, XetDownloadError) as problem:
        raise _explain(model_id, problem) from problem


def _explain(model_id: ModelId, problem: BaseException) -> CheckpointError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(problem, LocalEntryNotFoundError) and problem.__cause__ is not None:
        return _explain(model_id, problem.__cause__)
    status = problem.response.status_code if isinstance(problem, HfHubHTTPError) else None
    hub = f"the hub {constants.ENDPOINT}"
    if isinstance(problem, GatedRepoError):
        return CheckpointError(
            f"{model_id.repository} is gated: accept its terms on its page of the hub, and set HF_TOKEN to a token "
            f"that may read it (status {status})"
        )
    if isinstance(problem, RevisionNotFoundError):
        return CheckpointError(
            f"{model_id.repository} has no revision '{model_id.revision}' on {hub}; give a branch, a tag or a commit "
            f"that it has, or leave it out for {DEFAULT_REVISION}"
        )
    if isinstance(problem, RepositoryNotFoundError) or status == 404:
        return CheckpointError(
            f"there is no folder {model_id}, and {hub} shows no model {model_id.repository} (status {status}): look at "
            "the spelling; for a private model set HF_TOKEN to a token that may read it"
        )
    if status in REFUSED_STATUSES and not _is_old_address(problem):
        return CheckpointError(
            f"{hub} refuses {model_id.repository} (status {status}); set HF_TOKEN to a token that may read it"
        )
    if isinstance(problem, HFValidationError):
        return CheckpointError(f"{model_id} is no model id that huggingface_hub takes: {_line(problem)}")
    if isinstance(problem, OSError) and problem.errno is not None and status is None:
        return _explain_disk(model_id, problem)
    if status is not None and status < 500 and status not in PASSING_STATUSES and not _is_old_address(problem):
        return CheckpointError(f"{hub} answers a question about {model_id} with status {status}: {_line(problem)}")
    return HubUnreachable(
        f"there is no folder {model_id}, and it cannot be fetched from {hub}: {_line(problem)}; look at the network, "
        "at HF_ENDPOINT and at the proxy, and start again: files that are whole are kept"
    )


def _is_old_address(problem: Any) -> bool:
    """Whether a file was refused at its signed address, which runs out in a long download: a new one is given."""
    return problem.response.status_code == FORBIDDEN and "/api/" not in str(problem.response.url)


def _explain_disk(model_id: ModelId, problem: OSError) -> CheckpointError:
    if problem.errno in FULL_DISK:
        return CheckpointError(
            f"the disk is full while {model_id} is fetched: {problem}; free some space or set HF_HOME to another disk, "
            "and start again: files that are whole are kept"
        )
    return CheckpointError(
        f"{model_id} cannot be kept in the cache: {problem}; make the folder writable, or set HF_HOME to another one"
    )


def _line(problem: Any) -> str:
    """The first line of an error's text that says something."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(problem).__name__
