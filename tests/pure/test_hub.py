"""Model ids: the real huggingface_hub against a hub on loopback."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from glint.checkpoint import snapshot as snapshot_module
from glint.checkpoint.hub import HubUnreachable, ModelId, fetch_model, find_cached, locate_model, read_model_id
from glint.checkpoint.snapshot import Snapshot
from glint.checkpoint.table import inspect_checkpoint
from glint.errors import CheckpointError
from tests.house_rules.sources import ROOT
from tests.pure.checkpoint_files import small_folder
from tests.pure.model_hub import COMMIT, REVISIONS, Hub, serving_hub

ID = "zai-org/GLM-Small"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
NEEDED = sorted(
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors.index.json",
        *SHARDS,
    ]
)
USELESS = ["README.md", ".gitattributes", "pytorch_model.bin", "model.gguf", "consolidated.safetensors", "merges.txt"]
NEXT_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in three shards, with files beside it that no model needs."""
    folder = small_folder(tmp_path_factory.mktemp("repository"), "channel", 3, n_routed_experts=16, vocab_size=2000)
    for name in USELESS:
        (folder / name).write_bytes(b"useless")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(json.dumps({"x": name}))
    assert min((folder / name).stat().st_size for name in SHARDS) > 1_000_000
    return folder


@pytest.fixture
def hub(repository: Path) -> Iterator[Hub]:
    """A hub that has the small model, its weights in LFS."""
    with serving_hub(ID, repository, large_bytes=1_000_000) as running:
        yield running


@pytest.fixture
def cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; huggingface_hub of this process asks the hub of the test."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "hub"


def fetch(text: str = ID) -> Path:
    """The folder of a model id, without any line about it."""
    return locate_model(text, lambda line: None).folder


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_HUB_OFFLINE=1 does when huggingface_hub is imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def parts_of(cache: Path) -> list[Path]:
    """The unfinished files of a cache."""
    return list(cache.rglob("*.incomplete"))


@pytest.mark.parametrize(
    ("text", "model_id"),
    [
        ("zai-org/GLM-4.7-FP8", ModelId("zai-org/GLM-4.7-FP8", "main")),
        ("zai-org/GLM-4.7-FP8@main", ModelId("zai-org/GLM-4.7-FP8", "main")),
        (f"a/b@{COMMIT}", ModelId("a/b", COMMIT)),
        ("a/b@refs/pr/7", ModelId("a/b", "refs/pr/7")),
        ("a_1/b.c-d", ModelId("a_1/b.c-d", "main")),
    ],
)
def test_an_id_is_read_with_its_revision(text: str, model_id: ModelId, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_model_id(text) == read_model_id(Path(text)) == model_id
    assert read_model_id(str(model_id)) == model_id


@pytest.mark.parametrize(
    "text",
    [
        "nowhere",
        "/no/where",
        "./a/b",
        "../a",
        "a/b/c",
        "a/",
        "a b/c",
        "a/b--c",
        "a/b..c",
        "a/.b",
        "a/b\n",
        "é/b",
    ],
)
def test_what_is_neither_a_folder_nor_an_id_is_refused_with_both_ways_out(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"is not a folder, and not a model id either; give a folder with"):
        read_model_id(text)


@pytest.mark.parametrize("text", ["a/b@", "a/b@@x", "a/b@x y", "a/b@-x", "a/b@x/", "a/b@../x"])
def test_an_id_with_a_bad_revision_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"names no revision after its @; give a branch, a tag or a commit"):
        read_model_id(text)


def test_a_folder_that_exists_wins_and_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name@v1").mkdir()
    (tmp_path / "owner" / "file").write_text("")
    assert read_model_id("owner/name") is None
    assert read_model_id("owner/name@v1") is None
    assert locate_model("owner/name").folder == Path("owner/name")
    assert locate_model("owner/name").commit is None
    with pytest.raises(CheckpointError, match="owner/file is a file; give the model folder"):
        read_model_id("owner/file")
    with pytest.raises(CheckpointError, match="has 101 characters, the hub has at most 96"):
        read_model_id("a" * 50 + "/" + "b" * 50)
    with pytest.raises(CheckpointError, match="cannot be looked at"):
        read_model_id("a/" + "b" * 5000)


def test_exactly_the_needed_files_are_fetched_once(hub: Hub, cache: Path, repository: Path) -> None:
    lines: list[str] = []
    source = locate_model(ID, lines.append)
    assert source.repository == ID and source.commit == COMMIT and source.name == ID
    assert source.pinned_id == f"{ID}@{COMMIT}"
    assert source.folder == cache / "models--zai-org--GLM-Small" / "snapshots" / COMMIT
    assert sorted(path.name for path in source.folder.iterdir()) == NEEDED
    assert sorted(hub.fetched) == [(name, 0) for name in NEEDED]
    assert all((source.folder / name).read_bytes() == (repository / name).read_bytes() for name in NEEDED)
    assert inspect_checkpoint(source.folder).problems == ()
    assert lines[0].startswith(f"{ID} at commit {COMMIT}: {len(NEEDED) - 1} files, 0.0")
    assert lines[-1].startswith(f"{ID}: 0.0") and " 100%, " in lines[-1] and " GB/s" in lines[-1]
    hub.fetched.clear()
    assert fetch() == source.folder
    assert hub.fetched == []


def test_the_library_itself_finds_the_model_in_its_cache(hub: Hub, cache: Path) -> None:
    from huggingface_hub import scan_cache_dir, snapshot_download

    folder = fetch()
    assert snapshot_download(ID, local_files_only=True) == str(folder)
    info = scan_cache_dir(cache)
    assert not info.warnings
    (found,) = info.repos
    assert found.repo_id == ID and [revision.refs for revision in found.revisions] == [frozenset({"main"})]


def test_a_pinned_model_asks_the_hub_nothing_and_a_branch_asks_for_its_commit(hub: Hub, cache: Path) -> None:
    folder = fetch(f"{ID}@{COMMIT}")
    hub.num_questions = 0
    assert fetch(f"{ID}@{COMMIT}") == folder
    assert hub.num_questions == 0
    assert fetch() == folder
    assert hub.num_questions == 1
    hub.revisions["main"] = NEXT_COMMIT
    assert fetch().name == NEXT_COMMIT
    assert fetch(f"{ID}@v2").name == REVISIONS["v2"]
    assert sorted(name for name, _ in hub.fetched) == NEEDED


def test_a_broken_connection_goes_on_within_the_file(hub: Hub, cache: Path) -> None:
    hub.cut_after_bytes = 1 << 20
    assert inspect_checkpoint(fetch()).problems == ()
    again = [first for name, first in hub.fetched if first > 0]
    assert again == [1 << 20]


def test_a_file_with_a_wrong_hash_is_removed_and_named(hub: Hub, cache: Path, repository: Path) -> None:
    content = bytearray((repository / SHARDS[1]).read_bytes())
    content[-1] ^= 1
    hub.served[SHARDS[1]] = bytes(content)
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]} of {ID} at commit {COMMIT} has [0-9a-f]{{64}}, the hub"):
        fetch()
    assert find_cached(ModelId(ID)) is None
    storage = cache / "models--zai-org--GLM-Small"
    assert not (storage / "snapshots" / COMMIT / SHARDS[1]).exists()
    assert not (storage / "blobs" / hub.fingerprint(SHARDS[1])).exists()
    assert not parts_of(cache)
    hub.served.clear()
    assert inspect_checkpoint(fetch()).problems == ()


def test_a_small_file_with_a_wrong_hash_is_found_too(hub: Hub, cache: Path, repository: Path) -> None:
    hub.served["config.json"] = (repository / "config.json").read_bytes()[:-1] + b" "
    with pytest.raises(CheckpointError, match=r"config.json of .* has [0-9a-f]{40}, the hub has [0-9a-f]{40}"):
        fetch()


def test_a_file_with_a_wrong_size_is_removed_and_named(hub: Hub, cache: Path, repository: Path) -> None:
    size = (repository / SHARDS[0]).stat().st_size
    hub.served[SHARDS[0]] = (repository / SHARDS[0]).read_bytes()[:-8]
    with pytest.raises(CheckpointError, match=rf"{SHARDS[0]} of .* has {size - 8} bytes, the hub has {size}: it was"):
        fetch()
    assert find_cached(ModelId(ID)) is None and not parts_of(cache)


def test_a_file_that_changed_on_the_disk_before_its_record_is_found(hub: Hub, cache: Path) -> None:
    folder = fetch()
    (folder.parents[1] / "glint" / f"{COMMIT}.json").unlink()
    with (folder / SHARDS[2]).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(CheckpointError, match=f"{SHARDS[2]} of .* is removed; start again to fetch it anew"):
        fetch()
    hub.fetched.clear()
    fetch()
    assert hub.fetched == [(SHARDS[2], 0)]


def test_a_cut_file_in_the_cache_is_not_taken_for_whole(hub: Hub, cache: Path) -> None:
    os.truncate(fetch() / SHARDS[2], 1000)
    assert find_cached(ModelId(ID)) is None


@pytest.mark.parametrize(
    ("status", "code", "sentence"),
    [
        (
            404,
            "RepoNotFound",
            rf"no folder {ID}, and the hub http.* shows no model {ID} \(status 404\): .* set HF_TOKEN",
        ),
        (401, "RepoNotFound", rf"the hub http.* shows no model {ID} \(status 401\): .* set HF_TOKEN"),
        (401, "", rf"refuses {ID} \(status 401\); set HF_TOKEN to a token that may read it"),
        (401, "GatedRepo", rf"{ID} is gated: accept its terms .* set HF_TOKEN to a token that may read it"),
        (403, "GatedRepo", rf"{ID} is gated: accept its terms .* set HF_TOKEN to a token that may read it"),
        (403, "", rf"refuses {ID} \(status 403\); set HF_TOKEN to a token that may read it"),
        (418, "", r"with status 418"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(hub: Hub, cache: Path, status: int, code: str, sentence: str) -> None:
    hub.refusals, hub.refusal_code = [status], code
    with pytest.raises(CheckpointError, match=sentence) as caught:
        fetch()
    assert not isinstance(caught.value, HubUnreachable)
    assert "\n" not in str(caught.value) and hub.fetched == []


def test_a_token_opens_a_model(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token, hub.refusal_code = "hf_secret", "GatedRepo"
    with pytest.raises(CheckpointError, match="is gated") as caught:
        fetch()
    assert "hf_secret" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert inspect_checkpoint(fetch()).problems == ()


def test_a_revision_that_is_gone_is_named(hub: Hub, cache: Path) -> None:
    for revision in ("gone", "9" * 40):
        with pytest.raises(CheckpointError, match=f"{ID} has no revision '{revision}' on the hub .*give a branch"):
            fetch(f"{ID}@{revision}")


def test_a_hub_that_gives_no_commit_is_refused(hub: Hub, cache: Path) -> None:
    hub.revisions["main"] = "../../elsewhere"
    with pytest.raises(CheckpointError, match=r"gives '../../elsewhere' as the commit"):
        fetch()


def test_space_is_looked_at_before_the_first_weight(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "free_bytes", lambda place: 1_000_000)
    sentence = (
        rf"{ID} needs \d+\.\d\d GB more in {cache}/models--zai-org--GLM-Small, where 0\.00 GB are free; .*HF_HOME"
    )
    with pytest.raises(CheckpointError, match=sentence):
        fetch()
    assert hub.fetched == [("model.safetensors.index.json", 0)]
    monkeypatch.undo()
    assert snapshot_module.free_bytes(cache / "not" / "there") > 0


def test_files_that_are_there_need_no_space(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch()
    (folder.parents[1] / "glint" / f"{COMMIT}.json").unlink()
    monkeypatch.setattr(snapshot_module, "free_bytes", lambda place: 0)
    assert fetch() == folder


def test_a_disk_that_fills_up_is_named(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fill)
    with pytest.raises(CheckpointError, match=f"the disk is full while {ID} is fetched: .*HF_HOME"):
        fetch()
    assert find_cached(ModelId(ID)) is None and not parts_of(cache)


def test_without_network_the_cache_is_used_and_said(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    words = rf"there is no folder {ID}, and it cannot be fetched from the hub http://127.0.0.1:9: .*HF_ENDPOINT"
    with pytest.raises(HubUnreachable, match=words):
        fetch()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    folder = fetch()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    lines: list[str] = []
    assert locate_model(ID, lines.append).folder == folder
    assert len(lines) == 1 and f"the cache has commit {COMMIT} of {ID}, which is used" in lines[0]


def test_a_failure_of_the_hub_uses_the_cache_too_and_a_refusal_does_not(hub: Hub, cache: Path) -> None:
    folder = fetch()
    for status in (500, 503, 429):
        hub.refusals = [status]
        assert fetch() == folder
    hub.refusals = [403]
    with pytest.raises(CheckpointError, match="HF_TOKEN"):
        fetch()


def test_offline_uses_the_cache_or_says_what_to_do(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_offline(monkeypatch)
    for text in (ID, f"{ID}@{COMMIT}"):
        with pytest.raises(
            CheckpointError, match=rf"{text} is not in the cache, and HF_HUB_OFFLINE .*glint download {text}'"
        ):
            fetch(text)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = fetch()
    hub.num_questions = 0
    go_offline(monkeypatch)
    assert fetch() == fetch(f"{ID}@{COMMIT}") == folder
    assert hub.num_questions == 0


def test_offline_takes_what_another_program_fetched_if_it_is_whole(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(ID))
    go_offline(monkeypatch)
    assert find_cached(ModelId(ID)) is None
    assert fetch() == folder and find_cached(ModelId(ID)) is not None
    (folder.parents[1] / "glint" / f"{COMMIT}.json").unlink()
    (folder / SHARDS[0]).unlink()
    with pytest.raises(CheckpointError, match=rf"is not whole in the cache \(.*{SHARDS[0]}.*HF_HUB_OFFLINE"):
        fetch()


def test_offline_looks_at_the_hashes_that_the_links_name(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(ID))
    with (folder / SHARDS[0]).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    go_offline(monkeypatch)
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]} of .* is removed"):
        fetch()


def test_an_interrupted_update_leaves_the_older_commit_for_starts_without_network(
    hub: Hub, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch()
    hub.revisions["main"] = NEXT_COMMIT
    (tmp_path / "other.json").write_text("other")
    hub.files["config.json"] = tmp_path / "other.json"
    hub._fingerprints.clear()
    hub.served["config.json"] = b"wrong"
    with pytest.raises(CheckpointError):
        fetch()
    go_offline(monkeypatch)
    assert fetch() == folder


@pytest.mark.parametrize("gone", ["config.json", "model.safetensors.index.json", SHARDS[0]])
def test_a_repository_without_a_checkpoint_is_refused_by_name(hub: Hub, cache: Path, gone: str) -> None:
    del hub.files[gone]
    with pytest.raises(
        CheckpointError, match=f"{ID} at commit {COMMIT}.*{gone}|{gone}.* {ID} at commit {COMMIT}.*missing"
    ):
        fetch()
    assert not {name for name, _ in hub.fetched} & set(SHARDS)


def test_an_index_that_names_foreign_places_is_refused(hub: Hub, cache: Path, tmp_path: Path) -> None:
    for weight_map in ({"a": "../secret"}, {"a": "/etc/passwd"}, {"a": 1}, []):
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        hub.files[index.name] = index
        hub._fingerprints.clear()
        hub.revisions["main"] = f"{len(json.dumps(weight_map)):040d}"
        with pytest.raises(CheckpointError, match=r"names 1 files that are missing|has no weight_map"):
            fetch()


def test_several_processes_fetch_once(hub: Hub, cache: Path) -> None:
    hub.hold_after_bytes = 1 << 20
    lines: list[str] = []
    sources: list[Path] = []
    first = threading.Thread(target=lambda: sources.append(fetch()))
    first.start()
    assert hub.is_held.wait(30)
    others = [threading.Thread(target=lambda: sources.append(locate_model(ID, lines.append).folder)) for _ in range(3)]
    for thread in others:
        thread.start()
    deadline = time.monotonic() + 30
    while len(lines) < 3:
        assert not sources and time.monotonic() < deadline
        time.sleep(0.01)
    hub.hold_after_bytes = None
    hub.is_closed.set()
    for thread in [first, *others]:
        thread.join(60)
    assert len(sources) == 4 and len(set(sources)) == 1
    assert lines == [f"another process fetches {ID}; waiting for it"] * 3
    assert sorted(name for name, first_byte in hub.fetched if first_byte == 0) == NEEDED


PROGRAM = """
import sys
from glint.cli import main
sys.exit(main(["download", sys.argv[1]]))
"""


def start_download(hub: Hub, home: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    """`glint download` in a process of its own, which knows the hub by the environment alone."""
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)} | variables
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_download_that_a_signal_ends_leaves_nothing_half(hub: Hub, tmp_path: Path, sig: signal.Signals) -> None:
    hub.hold_after_bytes = 1 << 20
    with start_download(hub, tmp_path, ID) as process:
        assert hub.is_held.wait(60)
        process.send_signal(sig)
        hub.is_closed.set()
        _, errors = process.communicate(timeout=60)
    if sig is signal.SIGINT:
        assert process.returncode == 130
        assert "glint: stopped" in errors.splitlines() and "Traceback" not in errors
        assert not parts_of(tmp_path)
    else:
        assert process.returncode == -sig
    assert not list(tmp_path.rglob(f"glint/{COMMIT}.json"))
    hub.hold_after_bytes = None
    with start_download(hub, tmp_path, ID, HF_HUB_OFFLINE="1") as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "HF_HUB_OFFLINE" in errors and "Traceback" not in errors
    with start_download(hub, tmp_path, ID) as process:
        text, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert not parts_of(tmp_path)
    folder = Path(text.strip())
    assert folder == tmp_path / "hub" / "models--zai-org--GLM-Small" / "snapshots" / COMMIT
    assert sorted(path.name for path in folder.iterdir()) == NEEDED


def test_a_signal_while_the_index_is_fetched_leaves_no_part(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_and_stop(*_: object, **__: object) -> None:
        blobs = cache / "models--zai-org--GLM-Small" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / f"{'0' * 40}.ab.incomplete").write_bytes(b"{")
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.hf_hub_download", start_and_stop)
    with pytest.raises(KeyboardInterrupt):
        fetch()
    assert not parts_of(cache)


def test_a_snapshot_without_links_is_compared_by_size_alone(hub: Hub, cache: Path, repository: Path) -> None:
    folder = cache / "models--zai-org--GLM-Small" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for name in NEEDED:
        (folder / name).write_bytes((repository / name).read_bytes())
    assert {file.digest for file in Snapshot.open(ID, COMMIT).list_present().values()} == {""}
    assert fetch_model(ModelId(ID, COMMIT), lambda line: None).folder == folder
    assert hub.fetched == []


def check(capsys: pytest.CaptureFixture[str], text: str = ID) -> tuple[int, list[str], str]:
    """`glint check` of a model: the exit code, the lines after the first, and what went to standard error."""
    from glint.cli import main

    code = main(["check", text, "--tp", "2"])
    shown = capsys.readouterr()
    return code, shown.out.splitlines()[1:], shown.err


def test_check_of_an_id_reads_headers_alone_and_says_the_same_as_of_the_folder(
    hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, remote, _ = check(capsys)
    assert code == 0
    assert hub.sent_bytes < 1_200_000 and {first for _, first in hub.fetched} == {0}
    assert find_cached(ModelId(ID)) is None
    folder = fetch()
    hub.fetched.clear()
    assert check(capsys, str(folder)) == (0, remote, "")
    assert check(capsys) == (0, remote, "")
    assert hub.fetched == []


def test_check_of_an_id_asks_again_for_a_long_header_and_no_further(
    hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glint.checkpoint.remote_headers.FIRST_BYTES", 100)
    code, lines, _ = check(capsys)
    assert code == 0 and lines[-1] == "No problems."
    assert sorted(first for name, first in hub.fetched if name in SHARDS) == [0, 0, 0, 100, 100, 100]
    headers = sum(8 + int.from_bytes(hub.files[name].read_bytes()[:8], "little") for name in SHARDS)
    documents = ("config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json")
    assert hub.sent_bytes == headers + sum(hub.files[name].stat().st_size for name in documents)


def test_check_of_an_id_lists_the_problems_of_its_headers(
    hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str], repository: Path
) -> None:
    content = bytearray((repository / SHARDS[0]).read_bytes())
    content[:8] = (2**40).to_bytes(8, "little")
    hub.served[SHARDS[0]] = bytes(content)
    code, lines, _ = check(capsys)
    assert code == 1
    assert any(f"{SHARDS[0]}: HeaderTooLarge" in line for line in lines)


def test_check_of_an_id_that_is_none_or_is_not_there_is_one_sentence(
    hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, sentence in (("nowhere", "is not a folder"), ("a/b", "shows no model a/b"), (f"{ID}@no", "no revision")):
        code, _, errors = check(capsys, text)
        assert code == 1 and sentence in errors and errors.count("\n") == 1


def test_check_offline_says_what_to_do(
    hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_offline(monkeypatch)
    code, _, errors = check(capsys)
    assert code == 1 and "HF_HUB_OFFLINE" in errors
