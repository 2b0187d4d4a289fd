"""Replit's two files: what the run button starts, and the environment, read by Debian's nix without nixpkgs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from glint.cli import make_parser
from glint.server.auth import KEYS_VARIABLE
from tests.e2e.served import ROOT, free_port

NIX_FILE = ROOT / "replit.nix"
KEY_LINE = re.compile(r"API key until the next start: (\S+)")
START_SECONDS = 180.0
STOP_SECONDS = 60.0
PACKAGES = ("python312", "gcc14", "cmake", "ninja", "pkg-config", "zlib")

needs_nix = pytest.mark.skipif(
    shutil.which("nix-instantiate") is None, reason="needs nix-instantiate (Debian: apt install nix-bin)"
)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    """What .replit says."""
    return tomllib.loads((ROOT / ".replit").read_text())


@pytest.fixture
def entry() -> ModuleType:
    """run.py as a module."""
    spec = importlib.util.spec_from_file_location("glint_run", ROOT / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def server_words(config: dict[str, Any]) -> list[str]:
    """The command that the run button ends in, as words."""
    (line,) = (line for line in config["run"][2].splitlines() if "run.py" in line)
    return shlex.split(line)


def test_the_run_button_starts_what_run_py_takes(config: dict[str, Any], entry: ModuleType) -> None:
    assert config["run"][:2] == ["bash", "-c"] and len(config["run"]) == 3
    assert (ROOT / config["entrypoint"]).is_file()
    exec_word, program, *words = server_words(config)
    assert exec_word == "exec" and os.access(ROOT / program, os.X_OK)
    chosen, rest = entry.parse(words)
    assert chosen.serve and chosen.model is None
    served = make_parser().parse_args(["serve", *entry.glint_flags(chosen), *rest])
    assert [(port["localPort"], port["externalPort"]) for port in config["ports"]] == [(served.port, 80)]
    assert served.host == "0.0.0.0"


@contextmanager
def pressed(config: dict[str, Any], key: str, output: Path) -> Iterator[str]:
    """The run button pressed in this checkout, on a free port instead of its own; gives the address once it is ready.

    What it prints goes to a file. At the end it is asked to stop, and does.
    """
    port = free_port()
    shell, flag, script = config["run"]
    own = str(config["ports"][0]["localPort"])
    assert script.count(own) == 1
    command = [shell, flag, script.replace(own, str(port))]
    with output.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {KEYS_VARIABLE: key}, stdout=file)
    try:
        wait_for_ready(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        assert process.wait(STOP_SECONDS) == 0


def wait_for_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server says that it is ready."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the run button ended with {process.returncode}"
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url} is not ready after {START_SECONDS} s")


def status_of(url: str, key: str) -> int:
    """How the server answers a holder of this key."""
    return httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code


def test_the_run_button_shows_the_key_that_it_made(config: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "output"
    with pressed(config, "", output) as url:
        shown = KEY_LINE.search(output.read_text())
        assert shown is not None and len(shown[1]) == 32
        assert (status_of(url, "another"), status_of(url, shown[1])) == (401, 200)


def test_the_run_button_takes_a_secret_and_does_not_show_it(config: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / "output"
    with pressed(config, "sk-of-a-secret", output) as url:
        assert (status_of(url, "another"), status_of(url, "sk-of-a-secret")) == (401, 200)
    assert output.read_text() == ""


def nix_instantiate(folder: Path, *words: str | Path) -> str:
    """Run nix-instantiate with a store of its own."""
    environment = os.environ | {
        "HOME": str(folder),
        "NIX_STORE_DIR": str(folder / "store"),
        "NIX_STATE_DIR": str(folder / "state"),
    }
    done = subprocess.run(
        ["nix-instantiate", *words], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def evaluated(folder: Path, *cuda_sets: str) -> dict[str, Any]:
    """What replit.nix becomes for a package set that has these CUDA sets, each package being a path of its name.

    A name that it asks for and that is not among these fails the evaluation.
    """
    packages = [f'{name} = package "{name}";' for name in PACKAGES]
    cuda = [f'{name} = {{ cudatoolkit = package "{name}"; nccl = package "{name}-nccl"; }};' for name in cuda_sets]
    (folder / "call.nix").write_text(
        'let package = name: { outPath = "/${name}"; cc.lib.outPath = "/${name}-lib"; };\n'
        f"in import {NIX_FILE} {{ pkgs = {{ {' '.join(packages + cuda)}\n"
        'lib.makeLibraryPath = paths: builtins.concatStringsSep ":" (map (path: "${path}/lib") paths); }; }'
    )
    return dict(json.loads(nix_instantiate(folder, "--eval", "--strict", "--json", folder / "call.nix")))


@needs_nix
@pytest.mark.parametrize("cuda_sets", [("cudaPackages", "cudaPackages_13"), ("cudaPackages",)])
def test_the_environment_has_every_tool_and_variable(tmp_path: Path, cuda_sets: tuple[str, ...]) -> None:
    cuda = f"/{cuda_sets[-1]}"
    found = evaluated(tmp_path, *cuda_sets)
    assert found["deps"] == ["/python312", "/gcc14", "/cmake", "/ninja", "/pkg-config", cuda, f"{cuda}-nccl"]
    assert found["env"] == {
        "CUDA_HOME": cuda,
        "LD_LIBRARY_PATH": f"/gcc14-lib/lib:/zlib/lib:{cuda}/lib:{cuda}-nccl/lib",
        "CC": "/gcc14/bin/gcc",
        "CXX": "/gcc14/bin/g++",
    }
