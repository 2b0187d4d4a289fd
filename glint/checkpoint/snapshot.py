"""One commit of a model in huggingface_hub's cache: which files it needs, which it has, and whether they are right."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from glint.checkpoint.document import read_object
from glint.checkpoint.shards import INDEX_NAME, SINGLE_NAME, is_plain_name
from glint.checkpoint.transfer import Transfer, shown_transfer
from glint.errors import CheckpointError

DEFAULT_REVISION = "main"
CONFIG_NAME = "config.json"
TEXT_NAMES = (
    CONFIG_NAME,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
RECORD_FOLDER = "glint"
SHA256_CHARS = 64
SHA1_CHARS = 40
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class HubFile:
    """A file of a repository. `digest` is its sha256, or git's sha1 for a small file; empty where none is known."""

    name: str
    byte_count: int
    digest: str


@dataclass(frozen=True)
class Snapshot:
    """A commit of a repository in the cache.

    `storage` holds all of the repository; `folder` is the model folder, whose files are links to it. The record of what
    was found whole lies beside them.
    """

    repository: str
    commit: str
    storage: Path
    folder: Path

    @classmethod
    def open(cls, repository: str, commit: str, cache: Path | None = None) -> Self:
        """The place of a commit, which need not exist yet."""
        storage = _storage(repository, cache)
        return cls(repository, commit, storage, storage / "snapshots" / commit)

    @staticmethod
    def known_commit(repository: str, revision: str, cache: Path | None = None) -> str | None:
        """The commit that a revision was when it was last asked for; None where the cache does not know."""
        try:
            return (_storage(repository, cache) / "refs" / revision).read_text().strip() or None
        except OSError:
            return None

    def remember(self, revision: str) -> None:
        """Note which commit a revision is, for starts without network; a cache that is read-only stays as it is."""
        if revision != self.commit and self.known_commit(self.repository, revision, self.storage.parent) != self.commit:
            with suppress(OSError):
                _write_whole(self.storage / "refs" / revision, self.commit)

    @property
    def _record(self) -> Path:
        return self.storage / RECORD_FOLDER / f"{self.commit}.json"

    def is_whole(self) -> bool:
        """Whether every file of the record is there with its size; their hashes were compared before the record."""
        try:
            files = json.loads(self._record.read_text())["files"]
            return all((self.folder / file["name"]).stat().st_size == file["byte_count"] for file in files)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    @contextmanager
    def alone(self, wait: Callable[[], None]) -> Iterator[None]:
        """Hold the repository against other processes; `wait` is called where one of them has it.

        Where a disk is read-only or has no locks nobody is kept out: files appear whole in any case.
        """
        try:
            self._record.parent.mkdir(parents=True, exist_ok=True)
            file = (self._record.parent / "lock").open("w")
        except OSError:
            yield
            return
        with file:
            if not _takes(file):
                wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def remove_leftovers(self) -> None:
        """Remove parts of files that a killed process left, unless another program has the lock of the file."""
        locks = self.storage.parent / ".locks" / self.storage.name
        for part in (self.storage / "blobs").glob("*.incomplete"):
            locks.mkdir(parents=True, exist_ok=True)
            with (locks / f"{part.name.partition('.')[0]}.lock").open("a") as lock:
                if _takes(lock):
                    part.unlink(missing_ok=True)

    @contextmanager
    def leaving_no_parts(self) -> Iterator[None]:
        """Remove the parts of files when the body fails, also those that threads have open on a stalled connection."""
        try:
            yield
        except BaseException:
            with suppress(OSError):
                self._remove_own_parts()
                self.remove_leftovers()
            raise

    def _remove_own_parts(self) -> None:
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                part = descriptor.readlink()
                if part.suffix == ".incomplete" and part.parent == self.storage / "blobs":
                    part.unlink(missing_ok=True)

    def list_present(self) -> dict[str, HubFile]:
        """The files that the cache has; the links to them name their hashes."""
        return {
            path.name: HubFile(path.name, path.stat().st_size, path.readlink().name if path.is_symlink() else "")
            for path in sorted(self.folder.iterdir())
            if path.is_file()
        }

    def choose_files(self, files: Mapping[str, HubFile]) -> list[HubFile]:
        """The files of a repository that the model needs: config, tokenizer, template, index and the weights it names.

        The index is fetched for that where it is not there yet.
        """
        if CONFIG_NAME not in files:
            raise CheckpointError(
                f"{self.repository} at commit {self.commit} has no {CONFIG_NAME}; glint needs a checkpoint of GLM-4.x "
                "as transformers keeps it"
            )
        names = {name for name in TEXT_NAMES if name in files}
        if INDEX_NAME in files:
            self.bring(files[INDEX_NAME], Transfer(files[INDEX_NAME].byte_count))
            names |= {INDEX_NAME, *self._indexed_names(files)}
        elif SINGLE_NAME in files:
            names.add(SINGLE_NAME)
        else:
            raise CheckpointError(
                f"{self.repository} at commit {self.commit} has neither {INDEX_NAME} nor {SINGLE_NAME}; other formats "
                "than safetensors are not read, so give a repository that has it"
            )
        return [files[name] for name in sorted(names)]

    def _indexed_names(self, files: Mapping[str, HubFile]) -> set[str]:
        weight_map: Any = read_object(self.folder / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(
                f"{INDEX_NAME} of {self.repository} at commit {self.commit} has no weight_map from tensors to files"
            )
        names = set(weight_map.values())
        missing = sorted(name for name in names if not is_plain_name(name) or name not in files)
        if missing:
            raise CheckpointError(
                f"{INDEX_NAME} of {self.repository} at commit {self.commit} names {len(missing)} files that are "
                f"missing, {missing[0]!r} among them"
            )
        return names

    def check_space(self, files: Sequence[HubFile]) -> None:
        """Refuse a download that the disk has no room for, before its first byte."""
        needed = sum(file.byte_count for file in files if not self._has(file))
        free = free_bytes(self.storage)
        if needed > free:
            raise CheckpointError(
                f"{self.repository} needs {needed / 1e9:.2f} GB more in {self.storage}, where {free / 1e9:.2f} GB are "
                "free; free some space, or set HF_HOME to a folder on a larger disk"
            )

    def complete(self, files: Sequence[HubFile], num_threads: int, say: Callable[[str], None]) -> None:
        """Fetch the files that are missing, compare all with their sizes and hashes, then record them as whole."""
        transfer = Transfer(sum(file.byte_count for file in files))
        missing = [file for file in files if not self._has(file)]
        size = sum(file.byte_count for file in missing) / 1e9
        what = f"{len(missing)} files, {size:.2f} GB, to fetch" if missing else f"{len(files)} files to compare"
        say(f"{self.repository} at commit {self.commit}: {what}, in {self.folder}")
        jobs = [lambda file=file: self.bring(file, transfer) for file in files]
        with shown_transfer(self.repository, transfer, say):
            transfer.run(jobs, num_threads)
        with suppress(OSError):
            record = {"repository": self.repository, "commit": self.commit, "files": [asdict(file) for file in files]}
            _write_whole(self._record, json.dumps(record, indent=1) + "\n")

    def _has(self, file: HubFile) -> bool:
        return (self.folder / file.name).exists() or (self.storage / "blobs" / file.digest).is_file()

    def bring(self, file: HubFile, transfer: Transfer) -> None:
        """Fetch one file where it is missing, and compare it; a wrong file is removed."""
        is_fetched = not self._has(file)
        path = self.folder / file.name
        if not path.exists():
            from huggingface_hub import hf_hub_download

            meter: Any = _meter(transfer)
            hf_hub_download(
                self.repository, file.name, revision=self.commit, cache_dir=self.storage.parent, tqdm_class=meter
            )
        found = _digest(path, file.digest, (lambda _: transfer.count(0)) if is_fetched else transfer.count)
        size = path.stat().st_size
        if (size, found) != (file.byte_count, file.digest):
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            facts = (f"{size} bytes", f"{file.byte_count}") if size != file.byte_count else (found, file.digest)
            raise CheckpointError(
                f"{file.name} of {self.repository} at commit {self.commit} has {facts[0]}, the hub has {facts[1]}: it "
                "was damaged on its way or on the disk, and is removed; start again to fetch it anew"
            )


def _takes(lock: IO[str]) -> bool:
    """Take a lock unless another process has it; a disk that has no locks gives it to everybody."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def free_bytes(place: Path) -> int:
    """The free bytes of the disk where a folder is or will be."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _storage(repository: str, cache: Path | None) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    place = Path(constants.HF_HUB_CACHE if cache is None else cache).expanduser().resolve()
    return place / repo_folder_name(repo_id=repository, repo_type="model")


def _write_whole(path: Path, text: str) -> None:
    """Write a file that others see whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def _digest(path: Path, expected: str, count: Callable[[int], None]) -> str:
    """The hash of a file in the form of the expected one; where none is expected, nothing is read."""
    if len(expected) not in (SHA256_CHARS, SHA1_CHARS):
        count(path.stat().st_size)
        return expected
    digest = hashlib.sha256() if len(expected) == SHA256_CHARS else hashlib.sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            count(len(chunk))
    return digest.hexdigest()


def _meter(transfer: Transfer) -> type:
    """A progress bar as huggingface_hub asks for it, which counts bytes into a transfer and draws nothing."""

    class Meter:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            self.n = initial

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update(self, num_bytes: float | None = 1) -> None:
            transfer.count(int(num_bytes or 0))

        def ignore(self, *_: Any, **__: Any) -> None:
            pass

        update_transfer = set_postfix_str = set_transfer_postfix_str = set_description = refresh = close = ignore

    return Meter
