"""The Kubernetes manifests as kubectl renders them: valid by the API's own schemas, in agreement with the server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import glint
from glint.server.auth import OPEN_PATHS
from glint.server.limits import Limits
from tests.deploy.command_lines import DEPLOY, parse_check, parse_serve
from tests.deploy.dockerfile import read_stages

FOLDER = DEPLOY / "k8s"
OLDEST_VERSION = "1.30"
NEWEST_VERSION = kubernetes_validate.latest_version()
CHECKPOINT_BYTES = 362e9
SLOWEST_BYTES_PER_SECOND = 100e6
MARGIN_SECONDS = 30
IMAGE = f"glint:{glint.__version__}-cuda"

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl (Debian: apt install kubernetes-client)"
)


def documents(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """The objects of a folder as its files hold them, by kind."""
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    loaded = [yaml.safe_load((folder / name).read_text()) for name in names]
    return {one["kind"]: one for one in loaded}


def render(folder: Path) -> dict[str, dict[str, Any]]:
    """The objects that `kubectl apply -k` would send, by kind."""
    ended = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return {one["kind"]: one for one in yaml.safe_load_all(ended.stdout)}


def pod_of(kind: str) -> dict[str, Any]:
    """The pod that a Deployment or a Job starts."""
    return dict(documents()[kind]["spec"]["template"]["spec"])


def server_of() -> dict[str, Any]:
    """The container that serves."""
    (container,) = pod_of("Deployment")["containers"]
    return dict(container)


@needs_kubectl
@pytest.mark.parametrize("version", [OLDEST_VERSION, NEWEST_VERSION])
@pytest.mark.parametrize("folder", [FOLDER, FOLDER / "monitoring"], ids=lambda folder: folder.name)
def test_what_kubectl_renders_is_valid(folder: Path, version: str) -> None:
    objects = render(folder)
    assert len(objects) == len(documents(folder))
    for kind, one in objects.items():
        if kind != "ServiceMonitor":
            kubernetes_validate.validate(one, version, strict=True)
        if kind != "Namespace":
            assert one["metadata"]["namespace"] == "glint"


@needs_kubectl
def test_the_image_is_set_in_one_place() -> None:
    objects = render(FOLDER)
    pods = [objects[kind]["spec"]["template"]["spec"] for kind in ("Deployment", "Job")]
    containers = [one for pod in pods for one in (*pod["containers"], *pod.get("initContainers", []))]
    assert [one["image"] for one in containers] == [IMAGE] * 3


@pytest.mark.parametrize("folder", [FOLDER, FOLDER / "monitoring"], ids=lambda folder: folder.name)
def test_every_file_is_applied(folder: Path) -> None:
    listed = set(yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"])
    files = {file.name for file in folder.glob("*.yaml")} - {"kustomization.yaml", "adapter-values.yaml"}
    assert files == listed


def test_glint_takes_the_arguments() -> None:
    chosen = parse_serve(server_of()["args"])
    (check,) = pod_of("Deployment")["initContainers"]
    checked = parse_check(check["args"])
    gpus = server_of()["resources"]["limits"]["nvidia.com/gpu"]
    assert chosen.tp == checked.tp == gpus == 8
    assert chosen.model_dir == checked.model_dir
    assert (chosen.device, chosen.host) == ("cuda", "0.0.0.0")
    (port,) = server_of()["ports"]
    assert (port["name"], port["containerPort"]) == ("http", chosen.port)


def test_the_download_puts_the_model_where_the_server_looks() -> None:
    (download,) = pod_of("Job")["containers"]
    chosen = parse_serve(server_of()["args"])
    assert download["command"] == ["hf"]
    place = ["--local-dir", str(chosen.model_dir)]
    assert download["args"] == ["download", "zai-org/GLM-4.7-FP8", "--revision", "main", *place]
    hf = Path(sys.executable).with_name("hf")
    command = [str(hf), "download", "--help"]
    helped = subprocess.run(command, env={"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False)
    assert helped.returncode == 0, helped.stderr
    assert "--local-dir" in helped.stdout and "--revision" in helped.stdout


def test_only_the_download_may_write_to_the_models() -> None:
    for kind, is_reader in (("Job", False), ("Deployment", True)):
        pod = pod_of(kind)
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "models"]
        assert volume["persistentVolumeClaim"].get("readOnly", False) is is_reader
        for container in (*pod["containers"], *pod.get("initContainers", [])):
            (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "models"]
            assert (mount["mountPath"], mount.get("readOnly", False)) == ("/models", is_reader)


def test_a_pod_has_time_to_load_and_to_drain() -> None:
    server, pod = server_of(), pod_of("Deployment")
    startup = server["startupProbe"]
    load_seconds = startup["periodSeconds"] * startup["failureThreshold"]
    assert load_seconds >= CHECKPOINT_BYTES / SLOWEST_BYTES_PER_SECOND
    assert documents()["Deployment"]["spec"]["progressDeadlineSeconds"] > load_seconds
    chosen = parse_serve(server["args"])
    assert chosen.shutdown_timeout >= Limits().deadline_seconds
    before = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= before + chosen.shutdown_timeout + MARGIN_SECONDS
    readiness = server["readinessProbe"]
    assert before >= readiness["periodSeconds"] * readiness["failureThreshold"]


def test_the_probes_ask_the_routes_that_are_always_open() -> None:
    server = server_of()
    paths = {name: server[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert {server[name]["httpGet"]["port"] for name in paths} == {"http"}
    assert set(paths.values()) == OPEN_PATHS


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_pods_meet_the_restricted_standard(kind: str) -> None:
    labels = documents()["Namespace"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    pod = pod_of(kind)
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True and security["seccompProfile"] == {"type": "RuntimeDefault"}
    user = read_stages((DEPLOY / "Dockerfile").read_text())["cuda"].last("USER").text
    assert f"{security['runAsUser']}:{security['runAsGroup']}" == user
    assert pod["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all({"persistentVolumeClaim", "secret", "emptyDir"} & set(volume) for volume in pod["volumes"])
    for container in (*pod["containers"], *pod.get("initContainers", [])):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}


def test_keys_are_a_secret_that_is_not_in_the_repository() -> None:
    volumes = {volume["name"]: volume for volume in pod_of("Deployment")["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in server_of()["volumeMounts"]}
    assert volumes["keys"]["secret"] == {"secretName": "glint-keys", "defaultMode": 0o400}
    assert str(parse_serve(server_of()["args"]).api_key_file) == f"{mounts['keys']}/keys"
    assert "Secret" not in documents() and "env" not in server_of()


def test_the_model_volume_is_the_claimed_one_and_large_enough() -> None:
    volumes = {volume["name"]: volume for volume in pod_of("Deployment")["volumes"]}
    claim = documents()["PersistentVolumeClaim"]
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) * 2**30 > CHECKPOINT_BYTES


def test_the_service_finds_the_pods() -> None:
    service, deployment = documents()["Service"]["spec"], documents()["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert service["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]
    job = documents()["Job"]["spec"]["template"]["metadata"]["labels"]
    assert not service["selector"].items() <= job.items()
