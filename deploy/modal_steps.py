"""What the Modal app does inside its containers, as plain functions: check a model, run glint, keep a server.

Nothing here knows Modal. Run as a program it is the server that imports everything and then waits for its order, so
that a snapshot of a container holds a process which only has to read the weights.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

NO_GPU = "none"
DEFAULTS = {"GLINT_MODEL_ID": "zai-org/GLM-4.7-FP8", "GLINT_GPU": "B200:8", "GLINT_EXPERT_LAYOUT": "tp"}
SERVE_FLAGS = "GLINT_SERVE_FLAGS"
KEY_VARIABLE = "GLINT_API_KEY"
GPU_SHAPE = re.compile(r"[A-Za-z][\w!.-]*(?::[1-9]\d*)?")
POLL_SECONDS = 0.1
WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class SetupError(ValueError):
    """A variable of the deployment that cannot be used; the text names it and the way out."""


@dataclass(frozen=True)
class Setup:
    """What a deployment runs; `gpu` is written as Modal writes it, with the number of ranks behind the colon.

    Without a GPU (`GLINT_GPU=none`) the CPU engine runs, which is meant for the sample model.
    """

    model_id: str
    gpu: str | None
    expert_layout: str
    serve_flags: tuple[str, ...]

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Setup:
        """The setup that environment variables ask for; what is left out is GLM-4.7-FP8 on eight B200."""
        chosen = {name: environment.get(name) or default for name, default in DEFAULTS.items()}
        gpu, layout = chosen["GLINT_GPU"], chosen["GLINT_EXPERT_LAYOUT"]
        if not GPU_SHAPE.fullmatch(gpu):
            raise SetupError(f"GLINT_GPU is {gpu!r}; give a kind and a count such as B200:8, H100, or {NO_GPU}")
        if layout not in ("tp", "ep"):
            raise SetupError(f"GLINT_EXPERT_LAYOUT is {layout!r}; give tp or ep")
        flags = tuple(shlex.split(environment.get(SERVE_FLAGS, "")))
        return cls(chosen["GLINT_MODEL_ID"], None if gpu == NO_GPU else gpu, layout, flags)

    @property
    def tp(self) -> int:
        """Ranks that share the model, one per GPU."""
        return int((self.gpu or "").partition(":")[2] or 1)

    def as_environment(self) -> dict[str, str]:
        """The variables that `read` turns into this setup again, for the containers."""
        values = (self.model_id, self.gpu or NO_GPU, self.expert_layout)
        return dict(zip(DEFAULTS, values, strict=True)) | {SERVE_FLAGS: shlex.join(self.serve_flags)}

    def engine_flags(self, folder: Path) -> list[str]:
        """The flags that smoke, bench and serve share."""
        device = "cpu" if self.gpu is None else "cuda"
        ranks = ["--tp", str(self.tp), "--expert-layout", self.expert_layout]
        return ["--model", str(folder), "--device", device, *ranks]

    def server_flags(self, folder: Path, port: int) -> list[str]:
        """The command line of the server behind the endpoint; it listens on every address of its container."""
        where = ["--host", "0.0.0.0", "--port", str(port), "--served-model-name", self.model_id]
        return ["serve", *self.engine_flags(folder), *where, "--shutdown-timeout", "25", *self.serve_flags]


def check_model(folder: Path, setup: Setup) -> None:
    """Print what `glint check` says about a model folder; refuse one that cannot be served."""
    from glint.checkpoint.report import run_check
    from glint.errors import CheckpointError

    text, is_usable = run_check(folder, setup.tp, "ep" if setup.expert_layout == "ep" else "tp")
    print(text, end="", flush=True)
    if not is_usable:
        raise CheckpointError(f"{folder} cannot be served by {setup.tp} ranks; the problems are listed above")


def run_glint(arguments: Sequence[str]) -> None:
    """Run a glint command with its output in this log; refused where it fails."""
    from glint.errors import EngineError

    command = [sys.executable, "-m", "glint", *arguments]
    ended = subprocess.run(command, check=False)
    if ended.returncode != 0:
        raise EngineError(f"'glint {shlex.join(arguments)}' ended with exit code {ended.returncode}; see its output")


def start_waiting(folder: Path) -> subprocess.Popen[bytes]:
    """Start a server that imports everything and reads the tokenizer, touches no GPU and waits for its order."""
    said, says = os.pipe()
    command = [sys.executable, "-P", str(Path(__file__).resolve()), str(folder), str(says)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(says,))
    os.close(says)
    with os.fdopen(said, "rb") as answer:
        if not answer.read():
            process.communicate()
            raise SetupError(f"the server ended with exit code {process.returncode} while it was imported; see its log")
    return process


def begin(process: subprocess.Popen[bytes], arguments: Sequence[str], port: int) -> None:
    """Give a waiting server its command line and the environment of this moment; returns once it is ready.

    From then on the end of the server is the end of this process, unless `stop` asked for it: a container whose engine
    failed must not stay.
    """
    from glint.errors import EngineError

    if not os.environ.get(KEY_VARIABLE):
        raise SetupError(f"${KEY_VARIABLE} is not set, so anyone could use the endpoint; put it into the Modal secret")
    order = {"arguments": list(arguments), "environment": dict(os.environ)}
    if process.stdin is not None:
        process.stdin.write(json.dumps(order).encode())
        process.stdin.close()
    while not answers(f"http://127.0.0.1:{port}/ready"):
        if process.poll() is not None:
            raise EngineError(f"the server ended with exit code {process.returncode} while it started; see its log")
        time.sleep(POLL_SECONDS)
    threading.Thread(target=end_with, args=(process,), daemon=True).start()


def answers(url: str) -> bool:
    """Whether a GET of a server of this container is answered with 200; a proxy of the environment is not asked."""
    try:
        with WITHOUT_PROXY.open(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def end_with(process: subprocess.Popen[bytes]) -> None:
    """Wait for a server to end; end this process at once where the server failed."""
    code = process.wait()
    if code != 0:
        print(f"glint: the server ended with exit code {code}; its container ends with it", file=sys.stderr, flush=True)
        os._exit(1)


def stop(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Let a server drain; after so long it is killed. Gives its exit code."""
    process.terminate()
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def wait_for_order(folder: Path, says: int) -> int:
    """The waiting server itself: import, read the tokenizer, say so, wait for the order, serve; gives the exit code."""
    cast("dict[str, object]", sys.modules).setdefault("torch", None)
    from glint import cli
    from glint.server import serve
    from glint.text.tokenizer import Tokenizer

    Tokenizer(folder)
    with os.fdopen(says, "wb") as answer:
        answer.write(f"{serve.__name__} is imported".encode())
    order = json.load(sys.stdin)
    os.environ.update(order["environment"])
    return cli.main(order["arguments"])


if __name__ == "__main__":
    raise SystemExit(wait_for_order(Path(sys.argv[1]), int(sys.argv[2])))
