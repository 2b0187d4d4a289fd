"""Fetching and checking a model as the Modal app does it, against a hub on loopback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.deploy.conftest import DEPLOY, ROOT
from tests.deploy.modal_hub import Hub, serving_hub
from tests.pure.checkpoint_files import small_folder

MODEL_ID = "zai-org/GLM-4.7-FP8"
WEIGHTS = "model.safetensors"
PROGRAM = """
import sys
from pathlib import Path
import modal_steps
setup = modal_steps.Setup.read({"GLINT_GPU": "none"})
modal_steps.check_model(modal_steps.fetch_model(Path(sys.argv[1]), setup.model_id, "main"), setup)
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


def start_fetch(hub: Hub, models: Path) -> subprocess.Popen[str]:
    """Fetch in a process of its own, as the hub's address is read when its client is imported."""
    path = os.pathsep.join([str(DEPLOY), str(ROOT)])
    places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(models / "hub"), "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(models)],
        env=os.environ | places,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def fetch(hub: Hub, models: Path) -> tuple[int, str]:
    """Fetch to the end; gives the exit code and what was printed."""
    with start_fetch(hub, models) as process:
        text, _ = process.communicate(timeout=60)
        return process.returncode, text


def bytes_of(folder: Path, hub: Hub) -> dict[str, bytes]:
    """The fetched files of the model."""
    return {name: (folder / name).read_bytes() for name in hub.files}


def test_a_model_is_fetched_compared_and_checked_with_progress(tmp_path: Path, sample_model: Path) -> None:
    with serving_hub(MODEL_ID, sample_model) as hub:
        code, text = fetch(hub, tmp_path)
        assert code == 0, text
        assert bytes_of(tmp_path / MODEL_ID, hub) == {path.name: path.read_bytes() for path in sample_model.iterdir()}
        assert re.search(rf"^{MODEL_ID}: 0\.00 of 0\.17 GB, 0%, 0 MB/s$", text, re.MULTILINE)
        assert re.search(rf"^{MODEL_ID}: 0\.17 of 0\.17 GB, 100%, \d+ MB/s$", text, re.MULTILINE)
        assert f"{MODEL_ID}: {len(hub.files)} files have the checksums of the hub" in text
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
        kept = tmp_path / MODEL_ID / ".cache" / "huggingface" / "download"
        others = set(hub.files) - {WEIGHTS}
        while not all((kept / f"{name}.metadata").exists() for name in others):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)
        process.kill()
    assert list((tmp_path / MODEL_ID).rglob("*.incomplete"))
    hub.hold_after_bytes = None
    hub.fetched.clear()
    code, text = fetch(hub, tmp_path)
    assert code == 0, text
    assert hub.fetched == [(WEIGHTS, 0)]
    assert not list((tmp_path / MODEL_ID).rglob("*.incomplete"))


def test_a_changed_byte_is_found_and_mended_by_the_next_run(hub: Hub, tmp_path: Path) -> None:
    assert fetch(hub, tmp_path)[0] == 0
    weights = tmp_path / MODEL_ID / WEIGHTS
    status = weights.stat()
    with weights.open("r+b") as file:
        file.seek(20_000_000)
        file.write(b"x")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    hub.fetched.clear()
    code, text = fetch(hub, tmp_path)
    assert code != 0
    assert f"which were removed: {WEIGHTS}; run download_model again" in text
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
    assert f"{len(hub.files)} files have the checksums of the hub" in text
    assert "Problems (" in text
    assert "cannot be served by 1 ranks" in text


def test_a_model_that_the_hub_does_not_have_is_named_with_the_way_out(hub: Hub, tmp_path: Path) -> None:
    hub.model_id = "zai-org/another"
    code, text = fetch(hub, tmp_path)
    assert code != 0
    assert f"{MODEL_ID} at main could not be fetched whole: " in text
    assert "run download_model again, which goes on with what is in" in text


def test_the_setup_survives_its_way_into_a_container(modal_steps: ModuleType) -> None:
    flags = "--max-model-len 4096 --served-model-name 'a b'"
    setup = modal_steps.Setup.read({"GLINT_GPU": "H200:4", "GLINT_EXPERT_LAYOUT": "ep", "GLINT_SERVE_FLAGS": flags})
    assert modal_steps.Setup.read(setup.as_environment()) == setup
    assert setup.num_ranks == 4
    assert setup.serve_flags == ("--max-model-len", "4096", "--served-model-name", "a b")


def test_the_command_lines_are_those_of_glint(modal_steps: ModuleType) -> None:
    from glint.cli import make_parser

    setup = modal_steps.Setup.read({"GLINT_EXPERT_LAYOUT": "ep"})
    chosen = make_parser().parse_args(setup.server_flags(Path("folder"), 8000))
    assert (chosen.model, chosen.device, chosen.tp, chosen.expert_layout) == (Path("folder"), "cuda", 8, "ep")
    assert (chosen.host, chosen.port, chosen.served_model_name) == ("0.0.0.0", 8000, [MODEL_ID])
    assert chosen.shutdown_timeout == 25.0
    make_parser().parse_args(["smoke", *setup.engine_flags(Path("folder"))])


def test_a_model_that_was_not_fetched_is_refused_with_the_command(modal_steps: ModuleType, tmp_path: Path) -> None:
    from glint.errors import CheckpointError

    with pytest.raises(CheckpointError, match=f"::download_model --model-id {MODEL_ID}"):
        modal_steps.model_folder(tmp_path, MODEL_ID)
