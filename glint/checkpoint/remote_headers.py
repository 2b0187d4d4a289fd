"""The headers of a model on the hub, read by HTTP ranges into a folder whose weights are holes.

Everything that reads a model folder without its weights reads such a folder alike: every file has its full length, and
takes no space.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from glint.checkpoint.config import GENERATION_NAME
from glint.checkpoint.hub import (
    NUM_DOWNLOADS,
    ask_files,
    fetch_model,
    find_commit,
    named_errors,
    print_line,
    read_model_id,
)
from glint.checkpoint.safetensors import LENGTH_BYTES, MAX_HEADER_BYTES
from glint.checkpoint.shards import INDEX_NAME
from glint.checkpoint.snapshot import CONFIG_NAME, HubFile, Snapshot
from glint.checkpoint.table import SETTINGS_NAME
from glint.checkpoint.transfer import Transfer
from glint.errors import CheckpointError

READ_WHOLE = (CONFIG_NAME, GENERATION_NAME, SETTINGS_NAME, INDEX_NAME)
FIRST_BYTES = 1 << 18
PARTIAL_CONTENT = 206


@contextmanager
def readable_headers(model: str | Path) -> Iterator[Path]:
    """A folder with all of a model but its weights: the model's own where it is here, else one for the time of a block.

    Of a model id that the cache lacks, the small documents go into the cache, and headers are read from the hub.
    """
    model_id = read_model_id(model)
    if model_id is None:
        yield Path(model)
        return
    with named_errors(model_id):
        commit, is_online = find_commit(model_id, print_line)
    snapshot = Snapshot.open(model_id.repository, commit)
    if snapshot.is_whole() or not is_online:
        yield fetch_model(model_id).folder
        return
    with tempfile.TemporaryDirectory(prefix="glint-headers-") as place:
        folder = Path(place)
        with named_errors(model_id):
            files = snapshot.choose_files(ask_files(model_id.repository, commit))
            transfer = Transfer(0)
            jobs = [lambda file=file: _place(snapshot, file, folder, transfer) for file in files]
            transfer.run(jobs, NUM_DOWNLOADS)
        yield folder


def _place(snapshot: Snapshot, file: HubFile, folder: Path, transfer: Transfer) -> None:
    """Put one file of a model into the folder: a link to a document, or a hole after the header of weights."""
    place = folder / file.name
    if file.name in READ_WHOLE:
        snapshot.bring(file, transfer)
        place.symlink_to(snapshot.folder / file.name)
        return
    with place.open("wb") as target:
        if place.suffix == ".safetensors":
            target.write(read_remote_header(snapshot, file, transfer))
        target.truncate(file.byte_count)


def read_remote_header(snapshot: Snapshot, file: HubFile, transfer: Transfer) -> bytes:
    """The length and the header of a safetensors file on the hub; a second range where the header is long."""
    data = _read_range(snapshot, file, 0, min(FIRST_BYTES, file.byte_count), transfer)
    claimed = LENGTH_BYTES + min(int.from_bytes(data[:LENGTH_BYTES], "little"), MAX_HEADER_BYTES)
    end = min(claimed, file.byte_count)
    return (data + _read_range(snapshot, file, len(data), end, transfer))[:end]


def _read_range(snapshot: Snapshot, file: HubFile, begin: int, end: int, transfer: Transfer) -> bytes:
    """The bytes of a file from `begin` to before `end`."""
    from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers

    transfer.count(0)
    if begin >= end:
        return b""
    url = hf_hub_url(snapshot.repository, file.name, revision=snapshot.commit)
    headers = build_hf_headers() | {"Range": f"bytes={begin}-{end - 1}"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        if response.status_code != PARTIAL_CONTENT:
            raise CheckpointError(
                f"the hub {constants.ENDPOINT} gives no part of {file.name} (status {response.status_code} for a "
                f"range); run 'glint download {snapshot.repository}@{snapshot.commit}' and check the folder it prints"
            )
        data = response.read()
    if len(data) != end - begin:
        raise CheckpointError(
            f"the hub {constants.ENDPOINT} gives {len(data)} bytes of {file.name} where {end - begin} were asked for; "
            "try again later"
        )
    return data
