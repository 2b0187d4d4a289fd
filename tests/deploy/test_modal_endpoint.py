"""The bodies of the Modal functions, run here with the CPU engine and the sample model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import modal._partial_function as lifecycle
import openai
import pytest

from glint.bench.table import SECTIONS
from tests.deploy.conftest import DEPLOY, ROOT
from tests.e2e.served import free_port

KEY = "key-of-the-secret"
SECONDS = 60.0


def called(instance: Any, phase: lifecycle._PartialFunctionFlags) -> list[Callable[[], None]]:
    """The methods that a container calls in a phase of its life, found as Modal's own runtime finds them."""
    return list(lifecycle._find_callables_for_obj(instance, phase).values())


def run(function: Any, **arguments: Any) -> None:
    """Run the body of a Modal function here; Modal warns that its volume is not mounted."""
    with pytest.warns(UserWarning, match="executing locally"):
        function.local(**arguments)


@pytest.fixture(scope="module")
def endpoint(modal_app: ModuleType) -> Iterator[str]:
    """The endpoint's address, after a life up to there in the order of a container: before and after a snapshot."""
    flags = lifecycle._PartialFunctionFlags
    instance = modal_app.Endpoint._get_user_cls()()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modal_app, "PORT", free_port())
        (before,) = called(instance, flags.ENTER_PRE_SNAPSHOT)
        before()
        assert instance.process.poll() is None
        (after,) = called(instance, flags.ENTER_POST_SNAPSHOT)
        with pytest.MonkeyPatch.context() as secret:
            secret.setenv("GLINT_API_KEY", KEY)
            after()
        yield f"http://127.0.0.1:{modal_app.PORT}"
        (last,) = called(instance, flags.EXIT)
        last()
        assert instance.process.returncode == 0


def test_the_openai_client_is_answered_and_streamed_to(endpoint: str) -> None:
    with openai.OpenAI(base_url=f"{endpoint}/v1", api_key=KEY, max_retries=0, timeout=SECONDS) as client:
        assert [model.id for model in client.models.list()] == ["sample"]
        question = [{"role": "user", "content": "What is the capital of France?"}]
        whole = client.chat.completions.create(model="sample", messages=question, max_tokens=24, temperature=0)
        text = whole.choices[0].message.content
        assert "Paris" in text
        stream = client.chat.completions.create(
            model="sample", messages=question, max_tokens=24, temperature=0, stream=True
        )
        assert "".join(part.choices[0].delta.content or "" for part in stream) == text


def test_the_key_comes_from_the_moment_after_the_snapshot(endpoint: str) -> None:
    assert httpx.get(f"{endpoint}/ready", timeout=SECONDS).status_code == 200
    assert httpx.get(f"{endpoint}/v1/models", timeout=SECONDS).status_code == 401
    stranger = openai.OpenAI(base_url=f"{endpoint}/v1", api_key="another", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_an_endpoint_without_a_key_is_refused(modal_steps: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLINT_API_KEY", raising=False)
    refused = pytest.raises(modal_steps.SetupError, match="GLINT_API_KEY is not set, so anyone could use the endpoint")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process, refused:
        modal_steps.begin(process, [], free_port())


def test_the_server_is_asked_past_a_proxy_of_the_environment(endpoint: str) -> None:
    program = "import sys, modal_steps; print(*map(modal_steps.answers, sys.argv[1:]))"
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "all_proxy"), f"http://127.0.0.1:{free_port()}")
    command = [sys.executable, "-c", program, f"{endpoint}/ready", f"{endpoint}/nothing-here"]
    environment = {"PYTHONPATH": str(DEPLOY), "PATH": os.environ["PATH"]} | proxies
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout.split() == ["True", "False"]


def test_a_server_process_that_cannot_start_is_named(modal_steps: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(modal_steps.SetupError, match="ended with exit code 1 while it was imported"):
        modal_steps.start_waiting(tmp_path)


CONTAINER = """
import os, signal, sys, time
from pathlib import Path
import modal_steps
folder, port = Path(sys.argv[1]), int(sys.argv[2])
process = modal_steps.start_waiting(folder)
setup = modal_steps.Setup.read(os.environ)
modal_steps.begin(process, setup.server_flags(folder, port), port)
print(process.pid, flush=True)
time.sleep(60)
"""


def test_a_container_whose_server_dies_ends_at_once(sample_model: Path) -> None:
    variables = {"GLINT_MODEL_ID": "sample", "GLINT_GPU": "none", "GLINT_API_KEY": KEY}
    path = {"PYTHONPATH": os.pathsep.join([str(DEPLOY), str(ROOT)])}
    command = [sys.executable, "-c", CONTAINER, str(sample_model), str(free_port())]
    with subprocess.Popen(
        command, env=os.environ | variables | path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as container:
        assert container.stdout is not None
        os.kill(int(container.stdout.readline()), signal.SIGKILL)
        _, log = container.communicate(timeout=5)
    assert container.returncode == 1
    assert "glint: the server ended with exit code -9; its container ends with it" in log


def test_download_model_makes_and_checks_the_sample(
    modal_app: ModuleType, sample_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(modal_app.download_model)
    assert "No problems." in capfd.readouterr().out


def test_smoke_prints_what_glint_smoke_prints(modal_app: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    run(modal_app.smoke)
    printed = capfd.readouterr().out
    assert re.match(r"weights: \S+, without a record of a download\n", printed)
    assert "5 prompts" in printed
    assert "decode" in printed


def test_bench_prints_the_report_of_run_py(modal_app: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    run(modal_app.bench, concurrency="1", prompt_len=4, gen_len=2, duration=4.0)
    printed = capfd.readouterr().out
    assert " Serving Benchmark Result " in printed
    assert all(title in printed for _, _, title in SECTIONS)
    assert re.search(r"^Output token throughput \(tok/s\): +\d", printed, re.MULTILINE)


def test_a_glint_command_that_fails_is_named(modal_steps: ModuleType, tmp_path: Path) -> None:
    from glint.errors import EngineError

    with pytest.raises(EngineError, match=r"'glint check .*' ended with exit code 1"):
        modal_steps.run_glint(["check", str(tmp_path)])
