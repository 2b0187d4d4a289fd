"""The messages of other programs in docs/deploy.md are theirs, and the names in them are those of deploy/.

The texts of kubectl, Ray and pydantic come from the installed programs. Docker, the kubelet, the scheduler, nixpkgs and
Replit are not here: of their rows the names are checked, which are this project's own.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.deploy.command_lines import DEPLOY, ROOT
from tests.deploy.test_container_compose import load
from tests.deploy.test_kubernetes import documents, needs_kubectl, pod_of, server_of

DOCUMENT = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")


def rows_of(document: str) -> dict[str, tuple[str, str]]:
    """The rows of the second table of troubleshooting: program and way out, by the message."""
    section = document.split("\nMessages of the programs around it:\n", 1)[1]
    rows = re.findall(r"^\| ([A-Z]?[a-z]\w+) \| (.+?) \| (.+) \|$", section, re.MULTILINE)
    return {message: (program, way_out) for program, message, way_out in rows if program != "from"}


ROWS = rows_of(DOCUMENT)


def quoted(words: str) -> tuple[str, str]:
    """The one row whose message has these words: its first quoted text, and the way out."""
    ((message, (_, way_out)),) = [(message, row) for message, row in ROWS.items() if words in message]
    texts = re.findall(r"`([^`]+)`", message)
    return (texts[0] if texts else message), way_out


@cache
def texts_of_ray(path: str) -> list[str]:
    """The texts that a file of the installed Ray builds, with * for what it fills in."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None and spec.submodule_search_locations is not None
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / path).read_text(encoding="utf-8"))
    return [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
    ]


def kubectl_says(text: str) -> bool:
    """Whether the installed kubectl has a text among its own."""
    program = shutil.which("kubectl")
    assert program is not None
    return text.encode() in Path(program).resolve().read_bytes()


def check_key_file() -> None:
    text, way_out = quoted("GLINT_KEY_FILE")
    assert text == "required variable GLINT_KEY_FILE is missing a value"
    assert "${GLINT_KEY_FILE:?" in (DEPLOY / "compose.yaml").read_text()
    assert "`export GLINT_KEY_FILE=`" in way_out


def check_device_driver() -> None:
    text, _ = quoted("device driver")
    (devices,) = load()["services"]["cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert text == f'could not select device driver "{devices["driver"]}"'


def check_secret() -> None:
    text, _ = quoted("MountVolume")
    (volume,) = [volume for volume in pod_of("Deployment")["volumes"] if "secret" in volume]
    secret = volume["secret"]["secretName"]
    assert text == f'MountVolume.SetUp failed for volume "{volume["name"]}" : secret "{secret}" not found'


def check_init() -> None:
    _, way_out = quoted("Init:CrashLoopBackOff")
    (message,) = [message for message in ROWS if "Init:CrashLoopBackOff" in message]
    (container,) = pod_of("Deployment")["initContainers"]
    assert f"`kubectl -n glint logs POD -c {container['name']}`" in message
    assert f"`kubectl -n glint logs job/{documents()['Job']['metadata']['name']}`" in way_out


def check_gpus() -> None:
    text, way_out = quoted("nodes are available")
    (resource,) = [name for name in server_of()["resources"]["limits"] if "gpu" in name]
    assert text == f"0/N nodes are available: N Insufficient {resource}"
    assert server_of()["resources"]["limits"][resource] == 8 and "eight" in way_out


def check_service_monitor() -> None:
    text, _ = quoted("no matches for kind")
    words, kind = text.rsplit(" ", 1)
    assert kubectl_says(words)
    assert kind.strip('"') in documents(DEPLOY / "k8s" / "monitoring")


def check_immutable() -> None:
    text, way_out = quoted("immutable")
    assert kubectl_says(text)
    assert f"`kubectl -n glint delete job {documents()['Job']['metadata']['name']}`" in way_out


def check_arguments() -> None:
    text, _ = quoted("Extra inputs")
    ray_app = importlib.import_module("deploy.ray_app")
    with pytest.raises(ValidationError, match=text):
        ray_app.Arguments(replica=2)


def check_connection() -> None:
    text, _ = quoted("connect to Ray")
    assert any(one.startswith(text) for one in texts_of_ray("_private/worker.py"))


def check_scheduling() -> None:
    text, _ = quoted("to be scheduled")
    assert "30s" in text
    pattern = re.escape(text.replace("30s", "*s")).replace("N", r"\*")
    assert any(re.search(pattern, one) for one in texts_of_ray("serve/_private/deployment_state.py"))
    state = importlib.import_module("ray.serve._private.deployment_state")
    assert state.SLOW_STARTUP_WARNING_S == 30


def check_unfree() -> None:
    text, way_out = quoted("unfree")
    assert text == "refusing to evaluate" and "`NIXPKGS_ALLOW_UNFREE=1`" in way_out
    assert re.search(r"\bcuda\b", (ROOT / "replit.nix").read_text())


def check_replit() -> None:
    text, _ = quoted("502")
    assert text == "502 while starting"
    assert "run.py --serve" in (ROOT / ".replit").read_text()


CHECKS: dict[str, Callable[[], None]] = {
    "GLINT_KEY_FILE": check_key_file,
    "device driver": check_device_driver,
    "MountVolume": check_secret,
    "Init:CrashLoopBackOff": check_init,
    "nodes are available": check_gpus,
    "no matches for kind": check_service_monitor,
    "immutable": check_immutable,
    "Extra inputs": check_arguments,
    "connect to Ray": check_connection,
    "to be scheduled": check_scheduling,
    "unfree": check_unfree,
    "502": check_replit,
}


def test_every_row_has_a_check() -> None:
    assert len(ROWS) >= 12
    for message in ROWS:
        assert len([words for words in CHECKS if words in message]) == 1, message


@needs_kubectl
@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
@pytest.mark.parametrize("words", CHECKS)
def test_the_message_is_that_of_its_program_and_names_what_is_here(words: str) -> None:
    CHECKS[words]()


@needs_kubectl
def test_texts_that_no_program_has_are_not_found() -> None:
    assert not kubectl_says("no matches for sort")
    assert not any("cannot connect to Ray" in one for one in texts_of_ray("_private/worker.py"))
