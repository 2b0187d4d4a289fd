"""What `modal deploy deploy/modal_app.py` asks Modal for, as the real command sends it to a server on loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import ROOT
from tests.deploy.modal_recorder import Recorder, recording_server
from tests.house_rules.sources import repository_paths

PROGRAMS = ("modal_app.py", "modal_steps.py", "modal_weights.py")
GPU_FUNCTIONS = ("smoke", "bench", "Endpoint")


def deploy(recorder: Recorder, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command against the recorder."""
    account = {"MODAL_TOKEN_ID": "ak-test", "MODAL_TOKEN_SECRET": "as-test", "MODAL_CONFIG_PATH": str(folder / "none")}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MODAL_", "GLINT_"))}
    command = [sys.executable, "-m", "modal", "deploy", "deploy/modal_app.py"]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment | account | {"MODAL_SERVER_URL": recorder.url} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorder]:
    """The deployment with nothing chosen: GLM-4.7-FP8 on eight B200."""
    with recording_server() as recorder:
        ended = deploy(recorder, tmp_path_factory.mktemp("modal"))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        yield recorder


def variables_of(recorder: Recorder, function: Any) -> dict[str, str]:
    """The environment variables that a function's containers get, those of named secrets aside."""
    given: dict[str, str] = {}
    for secret_id in function.secret_ids:
        given |= dict(recorder.created[secret_id].env_dict)
    return given


def test_the_app_has_its_functions_and_is_published(deployed: Recorder) -> None:
    assert set(deployed.functions()) == {"download_model", *GPU_FUNCTIONS}
    (published,) = deployed.requests["AppPublish"]
    assert set(published.function_ids) == {"download_model", *GPU_FUNCTIONS}


def test_every_container_has_the_volume_of_weights_and_only_the_download_may_write(deployed: Recorder) -> None:
    (volume,) = deployed.requests["VolumeGetOrCreate"]
    assert volume.deployment_name == "glint-weights"
    for name, function in deployed.functions().items():
        (mount,) = function.volume_mounts
        assert mount.mount_path == "/models"
        assert deployed.created[mount.volume_id] is volume
        assert mount.read_only == (name != "download_model")


def test_the_endpoint_is_a_server_that_wants_the_secret_with_the_key(deployed: Recorder) -> None:
    endpoint = deployed.functions()["Endpoint"]
    assert endpoint.is_server
    secrets = [deployed.created[secret_id] for secret_id in endpoint.secret_ids]
    (named,) = [secret for secret in secrets if secret.deployment_name]
    assert named.deployment_name == "glint-api-key"
    assert list(named.required_keys) == ["GLINT_API_KEY"]
    assert endpoint.http_config.port == 8000
    assert endpoint.http_config.unauthenticated


def test_containers_get_the_setup_as_variables_and_gpus(deployed: Recorder) -> None:
    for function in deployed.functions().values():
        variables = variables_of(deployed, function)
        assert variables["GLINT_MODEL_ID"] == "zai-org/GLM-4.7-FP8"
        assert variables["GLINT_GPU"] == "B200:8"
    gpus = {name: one.resources.gpu_config for name, one in deployed.functions().items()}
    assert {(gpus[name].gpu_type, gpus[name].count) for name in GPU_FUNCTIONS} == {("B200", 8)}
    assert gpus["download_model"].count == 0


def test_the_image_holds_every_file_that_the_build_reads(deployed: Recorder) -> None:
    held = deployed.files_in("/source/")
    read = {"cmake", "glint", "native", "scripts", "CMakeLists.txt", "LICENSE", "NOTICE", "README.md", "pyproject.toml"}
    needed = {path.as_posix() for path in repository_paths(ROOT) if path.parts[0] in read}
    assert len(needed) > 100
    assert needed <= held
    assert not {name for name in held if "__pycache__" in name}


def test_containers_get_all_programs(deployed: Recorder) -> None:
    names = {Path(file.filename).name for mount in deployed.requests["MountGetOrCreate"] for file in mount.files}
    assert set(PROGRAMS) <= names


def test_a_container_imports_the_app_from_these_files_alone(tmp_path: Path) -> None:
    for name in PROGRAMS:
        (tmp_path / name).write_text((ROOT / "deploy" / name).read_text())
    program = "import modal_app, sys; print(modal_app.SETUP.gpu, 'glint' in sys.modules)"
    variables = {"PYTHONPATH": str(tmp_path), "PATH": os.environ["PATH"], "GLINT_GPU": "H200:8"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.split() == ["H200:8", "False"]


@pytest.mark.parametrize(("gpu", "kind", "count"), [("H100", "H100", 1), ("H200:8", "H200", 8)])
def test_model_and_gpu_are_parameters(tmp_path: Path, gpu: str, kind: str, count: int) -> None:
    with recording_server() as recorder:
        ended = deploy(recorder, tmp_path, GLINT_MODEL_ID="sample", GLINT_GPU=gpu)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        endpoint = recorder.functions()["Endpoint"]
        found = endpoint.resources.gpu_config
        assert (found.gpu_type, found.count) == (kind, count)
        assert variables_of(recorder, endpoint)["GLINT_MODEL_ID"] == "sample"


@pytest.mark.parametrize(
    ("variable", "value"), [("GLINT_GPU", "8 GPUs"), ("GLINT_GPU", "B200:0"), ("GLINT_EXPERT_LAYOUT", "both")]
)
def test_a_setup_that_makes_no_sense_is_refused_before_anything_is_asked(
    tmp_path: Path, variable: str, value: str
) -> None:
    with recording_server() as recorder:
        ended = deploy(recorder, tmp_path, **{variable: value})
        assert ended.returncode != 0
        assert f"{variable} is {value!r}" in ended.stdout + ended.stderr
        assert not recorder.requests["AppCreate"]
