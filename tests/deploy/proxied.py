"""A real nginx on loopback with the shipped configuration, in front of a port of this machine."""

from __future__ import annotations

import getpass
import os
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.deploy.command_lines import DEPLOY
from tests.e2e.served import free_port

PUBLIC_NAME = "glint.internal"
CONFIGURATION = DEPLOY / "nginx" / "glint.conf"
SYSTEM_FOLDERS = "/usr/sbin:/sbin:/usr/local/sbin"
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":" + SYSTEM_FOLDERS)
START_SECONDS = 30.0
MAIN = """\
{user}
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    scgi_temp_path {folder}/scgi;
    uwsgi_temp_path {folder}/uwsgi;
    include {folder}/glint.conf;
}}
"""


@dataclass(frozen=True)
class Proxied:
    """A running nginx: its port, its log, and the certificate that clients trust."""

    port: int
    log: Path
    certificate: Path

    @property
    def url(self) -> str:
        """The address that clients use."""
        return f"https://127.0.0.1:{self.port}"

    def client(self, seconds: float = 120.0) -> httpx.Client:
        """A client that asks for the public name, trusts the certificate and gives up after so many seconds."""
        trusted = ssl.create_default_context(cafile=str(self.certificate))
        named = {"Host": PUBLIC_NAME}
        return httpx.Client(base_url=self.url, verify=trusted, timeout=seconds, trust_env=False, headers=named)


def make_certificate(folder: Path) -> None:
    """A certificate for the public name and 127.0.0.1 that is its own authority."""
    kind = ["-x509", "-nodes", "-days", "1", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    names = ["-subj", f"/CN={PUBLIC_NAME}", "-addext", f"subjectAltName=DNS:{PUBLIC_NAME},IP:127.0.0.1"]
    files = ["-keyout", str(folder / "glint.key"), "-out", str(folder / "glint.pem")]
    subprocess.run(["openssl", "req", *kind, *names, *files], check=True, capture_output=True)


def configured(folder: Path, port: int, upstream_port: int, text: str) -> str:
    """The shipped configuration with the addresses and the certificate of this test."""
    for ours, theirs in (
        ("server 127.0.0.1:8000;", f"server 127.0.0.1:{upstream_port};"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("/etc/ssl/certs/glint.pem", f"{folder}/glint.pem"),
        ("/etc/ssl/private/glint.key", f"{folder}/glint.key"),
    ):
        assert text.count(ours) == 1, ours
        text = text.replace(ours, theirs)
    return text


@contextmanager
def proxied(folder: Path, upstream_port: int, text: str | None = None) -> Iterator[Proxied]:
    """nginx in front of a port for the time of a block; `text` replaces the shipped configuration."""
    assert NGINX is not None
    folder.mkdir(exist_ok=True)
    port, log = free_port(), folder / "nginx.log"
    make_certificate(folder)
    shipped = CONFIGURATION.read_text() if text is None else text
    (folder / "glint.conf").write_text(configured(folder, port, upstream_port, shipped))
    user = f"user {getpass.getuser()};" if os.getuid() == 0 else ""
    (folder / "nginx.conf").write_text(MAIN.format(user=user, folder=folder))
    with log.open("wb") as output:
        process = subprocess.Popen([NGINX, "-c", str(folder / "nginx.conf")], stdout=output, stderr=output)
    running = Proxied(port, log, folder / "glint.pem")
    try:
        wait_for_answer(running, process)
        yield running
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def wait_for_answer(running: Proxied, process: subprocess.Popen[bytes]) -> None:
    """Wait until nginx answers, whatever it says."""
    deadline = time.monotonic() + START_SECONDS
    with running.client() as client:
        while time.monotonic() < deadline:
            assert process.poll() is None, running.log.read_text()
            try:
                client.get("/health")
                return
            except httpx.TransportError:
                time.sleep(0.02)
    raise AssertionError("nginx does not answer:\n" + running.log.read_text())
