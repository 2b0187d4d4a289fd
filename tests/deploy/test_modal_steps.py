"""Fetching and checking a model as the Modal app does it, against a hub on loopback."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from glint.errors import CheckpointError
from tests.deploy.conftest import DEPLOY, ROOT
from tests.pure.checkpoint_files import small_folder
from tests.pure.model_hub import COMMIT, REVISIONS, Hub, serving_hub

MODEL_ID = "zai-org/GLM-4.7-FP8"
WEIGHTS = "model.safetensors"
NEEDED = {WEIGHTS, "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
OTHER_COMMIT = REVISIONS["v2"]
PROGRAM = """
import sys
from pathlib import Path
import modal_steps, modal_weights
setup = modal_steps.Setup.read({"GLINT_GPU": "none"})
models, revision, owner = sys.argv[1:]
modal_weights.RETRY_SECONDS = 0.05
modal_steps.check_model(modal_weights.fetch_model(Path(models), setup.model_id, revision, owner), setup)
"""


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `glint check` accepts, with one file of 31 MB."""
    return small_folder(tmp_path_factory.mktemp("small"), "channel", vocab_size=40_000)


@pytest.fixture
def hub(small_model: Path) -> Iterator[Hub]:
    """A hub where the small model goes by the name of the large one."""
    with serving_hub(MODEL_ID, small_model) as running:
        yield running


def start_fetch(hub: Hub, models: Path, revision: str = "main", owner: str = "this-call") -> subprocess.Popen[str]:
    """Fetch in a process of its own, as the hub's address is read when its client is imported."""
    path = os.pathsep.join([str(DEPLOY), str(ROOT)])
    places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(models / "hub"), "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(models), revision, owner],
        env=os.environ | places,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def fetch(hub: Hub, models: Path, revision: str = "main", owner: str = "this-call") -> tuple[int, str]:
    """Fetch to the end; gives the exit code and what was printed."""
    with start_fetch(hub, models, revision, owner) as process:
        text, _ = process.communicate(timeout=60)
        return process.returncode, text


def snapshot_of(models: Path, commit: str = COMMIT) -> Path:
    """The folder of a fetched model."""
    return models / "hub" / f"models--{MODEL_ID.replace('/', '--')}" / "snapshots" / commit


def bytes_of(folder: Path) -> dict[str, bytes]:
    """The files of a model folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_is_fetched_compared_and_checked_with_progress(tmp_path: Path, sample_model: Path) -> None:
    with serving_hub(MODEL_ID, sample_model) as hub:
        code, text = fetch(hub, tmp_path)
        assert code == 0, text
        expected = bytes_of(sample_model)
        del expected["glint_sample.json"]
        assert bytes_of(snapshot_of(tmp_path)) == expected
        size = f"{sum(map(len, expected.values())) / 1e9:.2f}"
        assert f"{MODEL_ID} at commit {COMMIT}: {len(expected)} files, {size} GB, to fetch, in " in text
        assert re.search(
            rf"^{MODEL_ID}: {re.escape(size)} of {re.escape(size)} GB, 100%, \d+\.\d\d GB/s$", text, re.MULTILINE
        )
        assert "Memory plan for 1 rank, experts by tp" in text
        assert text.rstrip().endswith("No problems.")
        hub.fetched.clear()
        code, text = fetch(hub, tmp_path)
        assert code == 0, text
        assert hub.fetched == []


def test_a_connection_that_breaks_goes_on_within_the_file(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after_bytes = 15_000_000
    code, text = fetch(hub, tmp_path)
    assert code == 0, text
    starts = [first for name, first in hub.fetched if name == WEIGHTS]
    assert len(starts) == 2
    assert starts[0] == 0 < starts[1] <= 16_000_000


def test_a_killed_download_goes_on_with_the_files_that_are_not_whole(hub: Hub, tmp_path: Path) -> None:
    hub.hold_after_bytes = 15_000_000
    with start_fetch(hub, tmp_path) as process:
        assert hub.is_held.wait(60)
        others = NEEDED - {WEIGHTS}
        while not all((snapshot_of(tmp_path) / name).exists() for name in others):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)
        process.kill()
    assert list(tmp_path.rglob("*.incomplete"))
    hub.hold_after_bytes = None
    hub.fetched.clear()
    code, text = fetch(hub, tmp_path)
    assert code == 0, text
    assert hub.fetched == [(WEIGHTS, 0)]
    assert not list(tmp_path.rglob("*.incomplete"))


def large_parts(models: Path) -> list[Path]:
    """The unfinished files that hold some megabytes already; small ones come and go."""
    found = []
    for path in models.rglob("*.incomplete"):
        with suppress(FileNotFoundError):
            found += [path] if path.stat().st_size > 5_000_000 else []
    return found


@pytest.mark.parametrize("owner", ["this-call", "another-call"])
def test_a_second_download_is_refused_while_the_first_runs_and_harms_nothing(
    hub: Hub, tmp_path: Path, owner: str
) -> None:
    hub.hold_after_bytes = 15_000_000
    with start_fetch(hub, tmp_path) as first:
        assert hub.is_held.wait(60)
        while not (parts := large_parts(tmp_path)):
            time.sleep(0.05)
        code, text = fetch(hub, tmp_path, owner=owner)
        assert code != 0
        assert f"{MODEL_ID} is being fetched by this-call (process {first.pid}, since 20" in text
        assert f"modal volume rm glint-weights {MODEL_ID}/.glint-download" in text
        assert first.poll() is None and large_parts(tmp_path) == parts
        hub.hold_after_bytes = None
        hub.is_closed.set()
        text, _ = first.communicate(timeout=60)
    assert first.returncode == 0, text
    assert bytes_of(snapshot_of(tmp_path)) == {name: hub.files[name].read_bytes() for name in NEEDED}
    assert fetch(hub, tmp_path, owner="another-call")[0] == 0


def test_a_download_that_was_killed_is_gone_on_with_by_its_owner_alone(
    tmp_path: Path, modal_weights: ModuleType
) -> None:
    from glint.errors import CheckpointError

    place = tmp_path / MODEL_ID / ".glint-download"
    place.parent.mkdir(parents=True)
    place.write_text("this-call\nprocess 7, since then")
    with (
        pytest.raises(CheckpointError, match=r"fetched by this-call \(process 7, since then\); .* remove "),
        modal_weights.held(tmp_path, MODEL_ID, "another-call"),
    ):
        raise AssertionError("another owner got in")
    with modal_weights.held(tmp_path, MODEL_ID, "this-call"):
        assert place.read_text().startswith(f"this-call\nprocess {os.getpid()}, since ")
    assert place.read_text() == ""


def test_a_changed_byte_is_found_and_mended_by_the_next_run(hub: Hub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path)[0] == 0
    weights = snapshot_of(tmp_path) / WEIGHTS
    status = weights.stat()
    with weights.open("r+b") as file:
        file.seek(20_000_000)
        file.write(b"x")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    hub.fetched.clear()
    code, text = fetch(hub, tmp_path)
    assert code != 0
    assert f"{WEIGHTS} of {MODEL_ID} at commit {COMMIT} has " in text and "is removed; start again" in text
    assert hub.fetched == []
    code, text = fetch(hub, tmp_path)
    assert code == 0, text
    assert hub.fetched == [(WEIGHTS, 0)]


def test_a_file_that_is_broken_at_its_source_is_found_by_glint_check(tmp_path: Path) -> None:
    source = small_folder(tmp_path / "source", "channel", vocab_size=40_000)
    os.truncate(source / WEIGHTS, (source / WEIGHTS).stat().st_size - 1000)
    with serving_hub(MODEL_ID, source) as hub:
        code, text = fetch(hub, tmp_path / "models")
    assert code != 0
    assert "Problems (" in text
    assert "cannot be served by 1 ranks" in text


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_the_hub_refuses_ends_at_the_first_question_with_the_reason(hub: Hub, tmp_path: Path, status: int) -> None:
    hub.refusals = [status] * 100
    code, text = fetch(hub, tmp_path)
    assert code != 0
    assert f"{MODEL_ID} (status {status})" in text and "set HF_TOKEN" in text
    assert hub.num_questions == 1


def test_a_file_whose_address_ran_out_is_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    hub.file_refusals = [403]
    code, text = fetch(hub, tmp_path)
    assert code == 0, text
    assert "attempt 1 of 6 failed: " in text and "403" in text


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_disk_without_locks_still_keeps_other_owners_out(
    modal_weights: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: object, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(modal_weights.fcntl, "flock", refuse)
    (tmp_path / MODEL_ID).mkdir(parents=True)
    taking = modal_weights.held(tmp_path, MODEL_ID, "another")
    with (
        modal_weights.held(tmp_path, MODEL_ID, "one"),
        pytest.raises(CheckpointError, match="is being fetched by one"),
        taking,
    ):
        pass
    with modal_weights.held(tmp_path, MODEL_ID, "another"):
        pass


def test_a_revision_that_is_not_there_is_named(hub: Hub, tmp_path: Path) -> None:
    code, text = fetch(hub, tmp_path, "v3")
    assert code != 0
    assert f"{MODEL_ID} has no revision 'v3' on the hub" in text and hub.num_questions == 1


def test_what_may_pass_is_tried_again_and_then_given_up_with_the_way_out(hub: Hub, tmp_path: Path) -> None:
    hub.refusals = [500, 500, 429]
    code, text = fetch(hub, tmp_path)
    assert code == 0, text
    assert f"{MODEL_ID} at main: attempt 1 of 6 failed: " in text
    hub.refusals, hub.num_questions = [500] * 100, 0
    code, text = fetch(hub, tmp_path)
    assert code != 0
    assert f"{MODEL_ID} at main could not be fetched whole in 6 attempts: " in text
    assert "run download_model again, which goes on with the files that are whole" in text
    assert hub.num_questions >= 6


def test_the_commit_is_recorded_beside_the_weights(hub: Hub, tmp_path: Path, modal_weights: ModuleType) -> None:
    assert fetch(hub, tmp_path)[0] == 0
    assert modal_weights.model_folder(tmp_path, MODEL_ID) == snapshot_of(tmp_path)
    assert (
        modal_weights.describe_weights(tmp_path, MODEL_ID) == f"weights: {MODEL_ID} at revision main, commit {COMMIT}"
    )
    code, text = fetch(hub, tmp_path, "v2")
    line = f"weights: {MODEL_ID} at revision v2, commit {OTHER_COMMIT}"
    assert code == 0 and line in text
    assert modal_weights.describe_weights(tmp_path, MODEL_ID) == line
    assert modal_weights.model_folder(tmp_path, MODEL_ID) == snapshot_of(tmp_path, OTHER_COMMIT)
    hub.refusals = [404]
    assert fetch(hub, tmp_path, "v2")[0] != 0
    assert modal_weights.describe_weights(tmp_path, MODEL_ID).endswith(", without a record of a download")
    with pytest.raises(CheckpointError, match="holds no model; fetch it first"):
        modal_weights.model_folder(tmp_path, MODEL_ID)


def test_the_setup_survives_its_way_into_a_container(modal_steps: ModuleType) -> None:
    flags = "--max-model-len 4096 --served-model-name 'a b'"
    setup = modal_steps.Setup.read({"GLINT_GPU": "H200:4", "GLINT_EXPERT_LAYOUT": "ep", "GLINT_SERVE_FLAGS": flags})
    assert modal_steps.Setup.read(setup.as_environment()) == setup
    assert setup.tp == 4
    assert setup.serve_flags == ("--max-model-len", "4096", "--served-model-name", "a b")


def test_the_command_lines_are_those_of_glint(modal_steps: ModuleType) -> None:
    from glint.cli import make_parser

    setup = modal_steps.Setup.read({"GLINT_EXPERT_LAYOUT": "ep"})
    chosen = make_parser().parse_args(setup.server_flags(Path("folder"), 8000))
    assert (chosen.model, chosen.device, chosen.tp, chosen.expert_layout) == (Path("folder"), "cuda", 8, "ep")
    assert (chosen.host, chosen.port, chosen.served_model_name) == ("0.0.0.0", 8000, [MODEL_ID])
    assert chosen.shutdown_timeout == 25.0
    make_parser().parse_args(["smoke", *setup.engine_flags(Path("folder"))])


def test_a_model_that_was_not_fetched_is_refused_with_the_command(modal_weights: ModuleType, tmp_path: Path) -> None:
    from glint.errors import CheckpointError

    with pytest.raises(CheckpointError, match=f"::download_model --model-id {MODEL_ID}"):
        modal_weights.model_folder(tmp_path, MODEL_ID)
