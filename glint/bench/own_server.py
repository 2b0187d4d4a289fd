"""A server that a bench starts for itself, measures and stops."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from glint.errors import EngineError

START_SECONDS = 600.0
STOP_SECONDS = 30.0
POLL_SECONDS = 0.05


@contextmanager
def own_server(flags: Sequence[str], entry: Sequence[str] = ("glint", "serve")) -> Iterator[str]:
    """Run `glint serve` with these flags on a free port of this machine; gives its address once it is ready.

    `entry` is the module that serves and its first arguments.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", *entry, "--port", str(port), *flags]
    process = subprocess.Popen(command)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise EngineError(f"the server ended with exit code {process.returncode} while it started; see its log")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_SECONDS)
    raise EngineError(f"the server was not ready within {START_SECONDS:g} s; see its log")
