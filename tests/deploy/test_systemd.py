"""The systemd unit: accepted by systemd's own checks, hardened, and in agreement with the server's flags."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from glint.server.auth import KEYS_VARIABLE
from glint.server.limits import Limits
from tests.deploy.command_lines import DEPLOY, parse_serve

UNIT = DEPLOY / "systemd" / "glint.service"
PROGRAM = "/usr/local/glint/bin/glint"
ENVIRONMENT = {
    "GLINT_MODEL": "/srv/models/GLM-4.7-FP8",
    "GLINT_FLAGS": "--device cuda --tp 8 --served-model-name glm-4.7",
    "GLINT_HOSTS": "chat.internal *.glint.internal",
    KEYS_VARIABLE: "first,second",
}
MARGIN_SECONDS = 30
MOST_EXPOSURE = 25

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (Debian: apt install systemd)"
)


def read_unit(text: str) -> dict[str, list[str]]:
    """The settings of all sections, each with its values in order."""
    settings: dict[str, list[str]] = defaultdict(list)
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        name, separator, value = line.partition("=")
        if separator:
            settings[name].append(value)
    return settings


SETTINGS = read_unit(UNIT.read_text())


def command_words(environment: dict[str, str]) -> list[str]:
    """The words of ExecStart as systemd makes them: `${NAME}` is one word, a bare `$NAME` is split."""
    (line,) = SETTINGS["ExecStart"]
    words: list[str] = []
    for word in shlex.split(line):
        if re.fullmatch(r"\$\w+", word):
            words += environment[word[1:]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda match: environment[match[1]], word))
    return words


def analyze(tmp_path: Path, *command: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze over the unit, with a program that exists here in place of glint's."""
    copy = tmp_path / UNIT.name
    copy.write_text((UNIT.read_text() if text is None else text).replace(PROGRAM, sys.executable))
    whole = ["systemd-analyze", *command, str(copy)]
    return subprocess.run(whole, capture_output=True, text=True, check=False)


@needs_systemd
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    ended = analyze(tmp_path, "verify", "--man=no")
    assert (ended.returncode, ended.stdout + ended.stderr) == (0, "")


@needs_systemd
def test_the_unit_is_hardened(tmp_path: Path) -> None:
    command = ["security", "--offline=yes", "--no-pager", f"--threshold={MOST_EXPOSURE}"]
    ended = analyze(tmp_path, *command)
    assert ended.returncode == 0, ended.stdout
    lines = UNIT.read_text().splitlines()
    bare = "\n".join(line for line in lines if not re.match("Protect|Restrict|SystemCall", line))
    assert analyze(tmp_path, *command, text=bare).returncode != 0


def test_glint_takes_the_command() -> None:
    program, *words = command_words(ENVIRONMENT)
    assert program == PROGRAM
    chosen = parse_serve(words)
    assert str(chosen.model_dir) == ENVIRONMENT["GLINT_MODEL"]
    assert (chosen.device, chosen.tp, chosen.host, chosen.port) == ("cuda", 8, "127.0.0.1", 8000)
    assert chosen.allowed_hosts == ["chat.internal", "*.glint.internal"]


def test_the_unit_answers_to_the_name_that_nginx_has() -> None:
    """What the environment file does not set is the name of the shipped proxy, which passes it on."""
    (line,) = [line for line in SETTINGS["Environment"] if "GLINT_HOSTS" in line]
    proxy = (DEPLOY / "nginx" / "glint.conf").read_text()
    assert f"server_name {line.removeprefix('GLINT_HOSTS=')};" in proxy and "proxy_set_header Host $host;" in proxy


def test_a_stop_drains_and_a_failure_restarts() -> None:
    chosen = parse_serve(command_words(ENVIRONMENT)[1:])
    assert chosen.shutdown_timeout >= Limits().deadline_seconds
    assert int(SETTINGS["TimeoutStopSec"][0]) >= chosen.shutdown_timeout + MARGIN_SECONDS
    assert (SETTINGS["KillSignal"], SETTINGS["KillMode"]) == (["SIGTERM"], ["mixed"])
    assert SETTINGS["Restart"] == ["on-failure"]
