"""What `serve run deploy.ray_app:app` takes, what it makes of it, and what it refuses before anything is started."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from glint.cli import make_parser
from glint.errors import RequestError
from glint.server.flags import read_settings
from tests.deploy.ray_served import SERVE
from tests.e2e.served import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecatedSince20")
GLM = {"device": "cuda", "tp": 8, "expert_layout": "ep", "replicas": 2}


@pytest.fixture(scope="module")
def ray_app() -> ModuleType:
    """The module under test, imported where the warnings of Ray's own imports are expected."""
    return importlib.import_module("deploy.ray_app")


def deployed(ray_app: ModuleType, sample_model: Path, **arguments: Any) -> Any:
    """The deployment that Ray is given for these arguments."""
    return ray_app.app(ray_app.Arguments(model=sample_model, **arguments))._bound_deployment


def test_a_cuda_replica_reserves_its_gpus(ray_app: ModuleType, sample_model: Path) -> None:
    deployment = deployed(ray_app, sample_model, **GLM)
    assert deployment.num_replicas == 2
    assert deployment.ray_actor_options["num_gpus"] == 8
    assert deployed(ray_app, sample_model, **GLM, gpus=4).ray_actor_options["num_gpus"] == 4


def test_a_cpu_replica_reserves_its_threads(ray_app: ModuleType, sample_model: Path) -> None:
    options = deployed(ray_app, sample_model, threads=3).ray_actor_options
    assert (options["num_cpus"], options.get("num_gpus")) == (3, None)
    shared = deployed(ray_app, sample_model, replicas=2).ray_actor_options
    assert shared["num_cpus"] == max(1, (os.cpu_count() or 1) // 2)


def test_the_settings_are_those_of_glint_serve(ray_app: ModuleType, sample_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("sk-one\nsk-two\n")
    flags = "--max-num-queued-reqs 7 --log-json --shutdown-timeout 5"
    arguments = ray_app.Arguments(model=sample_model, api_key_file=keys, flags=flags, **GLM)
    settings = read_settings(make_parser().parse_args(["serve", *ray_app.serve_flags(arguments)]))
    assert settings.model_dir == sample_model and len(settings.keys) == 2 and settings.logs_json
    assert [getattr(settings.engine_args, name) for name in ("device", "tp", "expert_layout")] == ["cuda", 8, "ep"]
    deployment = ray_app.app(arguments)._bound_deployment
    assert deployment.max_queued_requests == 7 < deployment.max_ongoing_requests
    assert deployment._deployment_config.graceful_shutdown_timeout_s > 5


@pytest.mark.parametrize(("routing", "router"), [("least-loaded", "PowerOfTwo"), ("session", "ConsistentHash")])
def test_requests_are_routed_by_a_router_of_ray(
    ray_app: ModuleType, sample_model: Path, routing: str, router: str
) -> None:
    config = deployed(ray_app, sample_model, routing=routing)._deployment_config.request_router_config
    assert config.get_request_router_class().__name__.startswith(router)


def test_relative_paths_are_those_of_who_starts_it(ray_app: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    flags = ray_app.serve_flags(ray_app.Arguments(model="models/glm", api_key_file="keys.txt"))
    assert "/models/glm" in flags and "/keys.txt" in flags


@pytest.mark.parametrize(
    ("key", "flags", "hosts"),
    [
        (None, "", ()),
        (None, "--allowed-hosts chat.internal", ("chat.internal",)),
        ("key", "", ("*",)),
        ("key", "--allowed-hosts chat.internal", ("chat.internal",)),
    ],
)
def test_the_names_of_rays_proxy_are_taken_where_a_key_guards(
    ray_app: ModuleType, sample_model: Path, key: str | None, flags: str, hosts: tuple[str, ...]
) -> None:
    given = flags if key is None else f"--api-key {key} {flags}"
    assert ray_app.settings_of(ray_app.Arguments(model=sample_model, flags=given)).hosts == hosts


def test_the_address_is_not_set_by_flags(ray_app: ModuleType) -> None:
    for flags in ("--port 9000", "--host=::"):
        with pytest.raises(RequestError, match="Ray's proxy listens"):
            ray_app.serve_flags(ray_app.Arguments(flags=flags))


@pytest.mark.parametrize(
    ("argument", "said"),
    [("replica=2", "Extra inputs are not permitted"), ("replicas=0", "greater than or equal to 1")],
)
def test_the_command_refuses_a_wrong_argument_before_it_starts_a_cluster(argument: str, said: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [SERVE, "run", "deploy.ray_app:app", argument]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode != 0
    assert said in ended.stderr and argument.partition("=")[0] in ended.stderr
    assert "Started a local Ray instance" not in ended.stderr


REPLICA = """
import asyncio, sys, time
import httpx
from deploy import ray_app
from glint.cli import make_parser
from glint.server.flags import read_settings

async def run():
    replica = ray_app.Glint(read_settings(make_parser().parse_args(["serve", *sys.argv[1:]])))
    app = await replica.__serve_build_asgi_app__()
    await replica.check_health()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
        body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True}
        answers = await asyncio.gather(*(client.post("/generate", json=body) for _ in range(3)))
    print(*(f"{answer.status_code} {answer.json()['error']['code']}" for answer in answers), sep="\\n", flush=True)
    await asyncio.sleep(30)

asyncio.run(run())
"""


def test_a_replica_whose_engine_fails_tells_its_requests_and_ends(sample_model: Path) -> None:
    library = os.environ.get("GLINT_TEST_LIBRARY") or str(ROOT / "build" / "libglint_cpu_test.so")
    command = [sys.executable, "-c", REPLICA, "--model", str(sample_model), "--engine", library]
    environment = os.environ | {"GLINT_FAULT": "step:0:30", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as replica:
        assert replica.stdout is not None
        told = [replica.stdout.readline().strip() for _ in range(3)]
        _, log = replica.communicate(timeout=60)
    assert told == ["500 engine_failed"] * 3, log
    assert replica.returncode == 1
    assert "the engine of this replica failed or makes no step; the process ends, Ray starts another" in log


@pytest.mark.parametrize("way", ["the task is cancelled", "receive fails"])
def test_a_client_that_left_is_told_to_the_application(ray_app: ModuleType, way: str) -> None:
    from ray.exceptions import TaskCancelledError

    heard: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append(await receive())
        heard.append(await receive())

    async def run() -> None:
        arriving: asyncio.Queue[Message] = asyncio.Queue()
        arriving.put_nowait({"type": "http.request"})

        async def receive() -> Message:
            if arriving.empty() and way == "receive fails":
                raise TaskCancelledError()
            return await arriving.get()

        async def send(message: Message) -> None:
            raise AssertionError(message)

        async def ending() -> None:
            raise AssertionError("the server is not to be closed")

        request = asyncio.create_task(ray_app.Carrier(app, ending)({"type": "http"}, receive, send))
        await asyncio.sleep(0.05)
        if way == "the task is cancelled":
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
        await asyncio.wait([request])

    asyncio.run(run())
    assert [message["type"] for message in heard] == ["http.request", "http.disconnect"]


def test_the_server_is_closed_at_the_end_of_the_lifespan(ray_app: ModuleType) -> None:
    order: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError(scope)

    async def close() -> None:
        order.append("closed")

    async def receive() -> Message:
        return {"type": "lifespan"}

    async def send(message: Message) -> None:
        order.append(message["type"])

    asyncio.run(ray_app.Carrier(app, close)({"type": "lifespan"}, receive, send))
    assert order == ["lifespan.startup.complete", "closed", "lifespan.shutdown.complete"]
