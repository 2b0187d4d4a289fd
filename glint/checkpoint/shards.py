"""The safetensors files of a model folder, and which tensor lies in which of them."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from glint.checkpoint.document import read_object
from glint.checkpoint.safetensors import Header, read_header
from glint.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_LISTED = 40
MAX_NAME_BYTES = 255


class ProblemList:
    """Collects problems; of one kind at most 40 are spelled out and the rest are counted."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, text: str) -> None:
        """Add one problem of a kind; the kind completes the sentence "and 12 more: <kind>"."""
        self._counts[kind] += 1
        if self._counts[kind] <= MAX_LISTED:
            self._lines.append(text)

    def extend(self, error: CheckpointError) -> None:
        """Add all problems that an error carries."""
        self._lines.extend(error.problems)

    def lines(self) -> tuple[str, ...]:
        """Give every listed problem, then one line for each kind that had more."""
        more = [f"and {n - MAX_LISTED} more: {kind}" for kind, n in self._counts.items() if n > MAX_LISTED]
        return (*self._lines, *more)


@dataclass(frozen=True)
class CheckpointFile:
    """A weight file: its path and its length."""

    path: Path
    byte_count: int


class PlacedTensor(NamedTuple):
    """Where a tensor lies: `file_offset` counts from the start of file number `file_index`."""

    dtype: str
    shape: tuple[int, ...]
    file_index: int
    file_offset: int
    byte_count: int


@dataclass(frozen=True)
class ShardSet:
    """All readable weight files of a folder and every tensor in them.

    `reported_names` are tensors whose absence is already explained by a problem of the index or of a file;
    `is_readable` is false when no file could be read.
    """

    files: tuple[CheckpointFile, ...]
    tensors: dict[str, PlacedTensor]
    reported_names: frozenset[str]
    is_readable: bool


def read_shards(folder: Path, problems: ProblemList, notes: list[str]) -> ShardSet:
    """Read every header of a model folder and compare them with the index.

    Problems and notes are appended; nothing is raised for bad content. Without an index there must be one
    model.safetensors.
    """
    weight_map = _read_weight_map(folder, problems)
    names = _shard_names(folder, weight_map, problems, notes)
    headers: dict[str, Header] = {}
    for name in names:
        try:
            headers[name] = read_header(folder / name)
        except CheckpointError as error:
            problems.extend(error)
    tensors = _place_tensors(headers, weight_map, problems)
    _check_index(weight_map or {}, headers, tensors, problems)
    reported = frozenset(name for name in weight_map or {} if name not in tensors)
    files = tuple(CheckpointFile(folder / name, header.file_bytes) for name, header in headers.items())
    return ShardSet(files, tensors, reported, bool(headers))


def _read_weight_map(folder: Path, problems: ProblemList) -> dict[str, str] | None:
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    try:
        weight_map: Any = read_object(path).get("weight_map")
    except CheckpointError as error:
        problems.extend(error)
        return {}
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        problems.add("index", f"{INDEX_NAME}: weight_map must map tensor names to file names; download it again")
        return {}
    return weight_map


def is_plain_name(name: str) -> bool:
    """Whether a name of the index can only be a file of the model folder itself."""
    has_separator = any(character in name for character in "/\\\0:")
    return name not in ("", ".", "..") and not has_separator and len(name.encode()) <= MAX_NAME_BYTES


def _shard_names(folder: Path, weight_map: dict[str, str] | None, problems: ProblemList, notes: list[str]) -> list[str]:
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if weight_map is None:
        if SINGLE_NAME not in present:
            problems.add("files", f"{folder} has neither {INDEX_NAME} nor {SINGLE_NAME}; download the weights")
        named = {SINGLE_NAME} & set(present)
    else:
        counts = Counter(weight_map.values())
        for name in sorted(counts):
            if not is_plain_name(name):
                text = f"{INDEX_NAME}: {name!r} is no plain file name; weight files must lie in the model folder"
                problems.add("names that are no plain file names", text)
            elif not (folder / name).exists():
                text = f"{name}: the file is missing, the index places {counts[name]} tensors in it; download it"
                problems.add("missing files", text)
        named = {name for name in counts if is_plain_name(name) and (folder / name).exists()}
    reason = f"there is no {INDEX_NAME}" if weight_map is None else "the index does not name it"
    notes.extend(f"{name} is ignored: {reason}" for name in present if name not in named)
    return sorted(named)


def _place_tensors(
    headers: dict[str, Header], weight_map: dict[str, str] | None, problems: ProblemList
) -> dict[str, PlacedTensor]:
    tensors: dict[str, PlacedTensor] = {}
    holders: dict[str, str] = {}
    for file_index, (file_name, header) in enumerate(headers.items()):
        for name, (dtype, shape, begin, end) in header.tensors.items():
            if name in holders:
                text = f"{name} lies in {holders[name]} and in {file_name}; one of them must go"
                problems.add("tensors in two files", text)
            elif weight_map is not None and name not in weight_map:
                text = f"{name} lies in {file_name}, but the index does not name it; write the index anew"
                problems.add("tensors that the index does not name", text)
            holders[name] = file_name
            tensors[name] = PlacedTensor(dtype, shape, file_index, header.data_start + begin, end - begin)
    return tensors


def _check_index(
    weight_map: dict[str, str], headers: dict[str, Header], tensors: dict[str, PlacedTensor], problems: ProblemList
) -> None:
    for name, file_name in weight_map.items():
        header = headers.get(file_name)
        if header is not None and name not in header.tensors:
            place = "lies in another file" if name in tensors else "is in no file that could be read"
            text = f"{name}: the index places it in {file_name}, where it is not; it {place}; write the index anew"
            problems.add("tensors that are not where the index places them", text)
