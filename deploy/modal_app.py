"""glint on Modal: `modal deploy deploy/modal_app.py` serves GLM-4.7-FP8 on eight B200, docs/deploy.md says how.

Environment variables choose what runs, for `modal run` and `modal deploy` alike: GLINT_MODEL_ID (a model of the hub, or
`sample`), GLINT_GPU (kind and count, or `none`), GLINT_EXPERT_LAYOUT (tp or ep), GLINT_SERVE_FLAGS (more flags of
`glint serve`). The work itself is in modal_steps.py and modal_weights.py.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import modal
import modal_steps as steps
from modal_weights import describe_weights, fetch_model, model_folder

SETUP = steps.Setup.read(os.environ)
MODELS = Path("/models")
PORT = 8000
MINUTE = 60
HOUR = 60 * MINUTE
CHECKOUT = Path(__file__).resolve().parents[1]
SOURCE_FOLDERS = ("cmake", "glint", "native", "scripts")
SOURCE_FILES = ("CMakeLists.txt", "LICENSE", "NOTICE", "README.md", "pyproject.toml")
BUILD = (
    "python -m pip install '/source[cuda]' --config-settings=cmake.define.GLINT_CUDA=ON "
    "'--config-settings=build.targets=glint_cpu;glint_cuda'"
)


def make_image() -> modal.Image:
    """The image of every container: the CUDA toolkit, and glint with both native libraries built into its package."""
    image = modal.Image.from_registry("nvidia/cuda:13.0.2-devel-ubuntu24.04", add_python="3.12").entrypoint([])
    image = image.apt_install("g++", "ninja-build")
    image = image.env({"HF_XET_HIGH_PERFORMANCE": "1"})
    for name in SOURCE_FOLDERS:
        image = image.add_local_dir(CHECKOUT / name, f"/source/{name}", copy=True, ignore=["**/__pycache__"])
    for name in SOURCE_FILES:
        image = image.add_local_file(CHECKOUT / name, f"/source/{name}", copy=True)
    return image.run_commands(BUILD).add_local_python_source("modal_steps", "modal_weights")


app = modal.App("glint")
image = make_image()
weights = modal.Volume.from_name("glint-weights", create_if_missing=True, version=2)
api_key = modal.Secret.from_name("glint-api-key", required_keys=[steps.KEY_VARIABLE])
common: dict[str, Any] = {"image": image, "env": SETUP.as_environment()}
container = common | {"volumes": {str(MODELS): weights.with_mount_options(read_only=True)}}


@app.function(**common, volumes={str(MODELS): weights}, cpu=8, timeout=24 * HOUR)
def download_model(model_id: str = SETUP.model_id, revision: str = "main") -> None:
    """Fetch a model into the volume, going on where an earlier run ended, and check every file of it.

    No other function may write there. A container that Modal starts anew for the same call goes on with it.
    """
    steps.check_model(fetch_model(MODELS, model_id, revision, modal.current_function_call_id()), SETUP)


@app.function(**container, gpu=SETUP.gpu, cpu=16, memory=64 * 1024, timeout=2 * HOUR)
def smoke() -> None:
    """Say which weights these are and run `glint smoke`: five prompts greedily, everything checked."""
    folder = model_folder(MODELS, SETUP.model_id)
    print(describe_weights(MODELS, SETUP.model_id), flush=True)
    steps.run_glint(["smoke", *SETUP.engine_flags(folder)])


@app.function(**container, gpu=SETUP.gpu, cpu=16, memory=64 * 1024, timeout=2 * HOUR)
def bench(concurrency: str = "64", prompt_len: int = 256, gen_len: int = 256, duration: float = 60.0) -> None:
    """Run `glint bench serve`, which prints the report of `./run.py --bench`."""
    load = ["--concurrency", concurrency, "--prompt-len", str(prompt_len), "--gen-len", str(gen_len)]
    flags = SETUP.engine_flags(model_folder(MODELS, SETUP.model_id))
    steps.run_glint(["bench", "serve", *flags, *load, "--duration", str(duration)])


@app.server(
    **container,
    gpu=SETUP.gpu,
    cpu=16,
    memory=64 * 1024,
    secrets=[api_key],
    port=PORT,
    unauthenticated=True,
    target_concurrency=64,
    max_containers=1,
    scaledown_window=15 * MINUTE,
    startup_timeout=HOUR,
    exit_grace_period=10 * MINUTE,
    enable_memory_snapshot=True,
)
class Endpoint:
    """The real glint server behind Modal's HTTPS; glint itself asks every client for the key of the secret.

    A snapshot holds the server process with all its modules, before it has touched a GPU; a container that starts from
    it reads the weights and is ready.
    """

    process: subprocess.Popen[bytes]

    @modal.enter(snap=True)
    def import_server(self) -> None:
        """Start the server process up to where it would need a GPU."""
        self.process = steps.start_waiting(model_folder(MODELS, SETUP.model_id))

    @modal.enter()
    def serve(self) -> None:
        """Let it load the model; returns when it is ready."""
        flags = SETUP.server_flags(model_folder(MODELS, SETUP.model_id), PORT)
        steps.begin(self.process, flags, PORT)

    @modal.exit()
    def drain(self) -> None:
        """Let it finish what it has: by now Modal has waited for requests, and gives this method 30 s."""
        steps.stop(self.process, 28.0)
