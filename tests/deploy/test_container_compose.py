"""compose.yaml: what the schema allows, and names, ports, times and flags that agree with the image and the server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import glint
from glint.cli import run_sample_model
from tests.deploy.command_lines import DEPLOY, ROOT, fill_in, parse, parse_serve, seconds
from tests.deploy.dockerfile import read_stages

FILE = DEPLOY / "compose.yaml"
PORT = 8000
MARGIN_SECONDS = 30
STAGES = read_stages((DEPLOY / "Dockerfile").read_text())


def load(**values: str) -> dict[str, Any]:
    """The file as compose reads it with these variables set."""
    given = {"GLINT_KEY_FILE": "keys.txt"} | values
    return dict(filled(yaml.safe_load(FILE.read_text()), given))


def filled(node: Any, values: dict[str, str]) -> Any:
    """A part of the file with the variables in its texts filled in."""
    if isinstance(node, dict):
        return {name: filled(inner, values) for name, inner in node.items()}
    if isinstance(node, list):
        return [filled(inner, values) for inner in node]
    return fill_in(node, values) if isinstance(node, str) else node


def check_schema(path: Path) -> subprocess.CompletedProcess[str]:
    """The verdict of the schema of the Compose specification, which check-jsonschema carries."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_schema_accepts_it() -> None:
    verdict = check_schema(FILE)
    assert verdict.returncode == 0, verdict.stdout + verdict.stderr


def test_without_a_key_file_it_is_refused() -> None:
    with pytest.raises(AssertionError, match="GLINT_KEY_FILE"):
        load(GLINT_KEY_FILE="")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_image_is_the_target_of_that_name(name: str) -> None:
    service = load()["services"][name]
    assert service["profiles"] == [name]
    assert service["image"] == f"glint:{glint.__version__}-{name}"
    build = service["build"]
    assert build["target"] == name and name in STAGES
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).samefile(DEPLOY / "Dockerfile")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_server_takes_the_command_and_has_time_to_drain(name: str) -> None:
    service = load()["services"][name]
    chosen = parse_serve(service["command"])
    assert chosen.device == name and chosen.host == "0.0.0.0"
    assert service["ports"] == [f"127.0.0.1:{chosen.port}:{PORT}"] and chosen.port == PORT
    assert seconds(service["stop_grace_period"]) >= chosen.shutdown_timeout + MARGIN_SECONDS
    assert service["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_keys_come_from_a_secret_and_models_from_a_volume(name: str) -> None:
    whole = load()
    service = whole["services"][name]
    assert service["secrets"] == ["api_keys"] and whole["secrets"] == {"api_keys": {"file": "keys.txt"}}
    assert str(parse_serve(service["command"]).api_key_file) == "/run/secrets/api_keys"
    assert "environment" not in service
    (volume,) = service["volumes"]
    assert volume == "models:/models:ro" and "models" in whole["volumes"]
    assert load(GLINT_MODELS="/srv/models")["services"][name]["volumes"] == ["/srv/models:/models:ro"]


@pytest.mark.parametrize("name", ["sample", "download"])
def test_only_a_download_may_write_to_the_models(name: str) -> None:
    services = load(GLINT_MODELS="/srv/models")["services"]
    assert services[name]["volumes"] == ["/srv/models:/models"]
    assert services[name]["profiles"] == ["download"] and "restart" not in services[name]
    assert services[name]["healthcheck"] == {"disable": True}
    writers = {one for one, service in services.items() if not service["volumes"][0].endswith(":ro")}
    assert writers == {"sample", "download"}


@pytest.mark.parametrize("revision", ["", "0123456789abcdef"])
def test_the_download_puts_the_model_where_the_server_looks(revision: str) -> None:
    services = load(GLINT_REVISION=revision)["services"]
    download, chosen = services["download"], parse_serve(services["cuda"]["command"])
    place = ["--local-dir", str(chosen.model_dir)]
    assert download["entrypoint"] == ["hf"]
    assert download["command"] == ["download", "zai-org/GLM-4.7-FP8", "--revision", revision or "main", *place]
    assert (download["image"], download["build"]) == (services["cuda"]["image"], services["cuda"]["build"])
    mounted = download["volumes"][0].rpartition(":")[2]
    assert str(chosen.model_dir).startswith(f"{mounted}/")
    assert download["environment"]["HF_HOME"].startswith(f"{mounted}/")


def test_the_sample_is_made_where_the_server_of_the_cpu_looks() -> None:
    services = load()["services"]
    assert parse(services["sample"]["command"]).run is run_sample_model
    assert parse_serve(services["cpu"]["command"]).model is None
    assert (services["sample"]["image"], services["sample"]["build"]) == (
        services["cpu"]["image"],
        services["cpu"]["build"],
    )
    assert "GLINT_CACHE=/models" in STAGES["cpu"].last("ENV").text.split()


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_healthy_means_ready(name: str) -> None:
    test = load()["services"][name]["healthcheck"]["test"]
    places = [one.words for one in STAGES[name].all("COPY") if one.words[0].endswith("healthcheck.py")]
    assert test == ["CMD", "python", f"{places[0][1]}healthcheck.py", "/ready"]


@pytest.mark.parametrize("count", ["8", "1"])
def test_as_many_gpus_are_reserved_as_there_are_ranks(count: str) -> None:
    service = load(GLINT_GPUS=count)["services"]["cuda"]
    (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices == {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
    assert parse_serve(service["command"]).tp == int(count)
