"""Models by their ids: a server, a command and `LLM` that fetch a small model from a hub on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.raw_http import wait_for
from tests.e2e.served import ROOT, Served, served, start
from tests.e2e.small_glm import write_small_glm
from tests.pure.model_hub import COMMIT, Hub, serving_hub

ID = "zai-org/GLM-Small"
NEXT_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
ASK = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "temperature": 0}
PROGRAM = """
import sys
from glint import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    answer = llm.generate(prompt_token_ids=[[5, 6, 7]], sampling_params=SamplingParams(temperature=0, max_tokens=4))
    print(llm.source.repository, llm.source.commit, *answer[0].token_ids)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    return write_small_glm(tmp_path_factory.mktemp("hub") / "model")


@pytest.fixture
def hub(model: Path) -> Iterator[Hub]:
    """A hub that has it, its weights in LFS."""
    with serving_hub(ID, model, large_bytes=100_000) as running:
        yield running


def environment_of(hub: Hub, home: Path) -> dict[str, str]:
    """Where huggingface_hub finds the hub and keeps its cache."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)}


def check_served(server: Served, commit: str) -> list[int]:
    """Whether the routes tell the id and the commit; gives the tokens of an answer."""
    (entry,) = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"]
    assert (entry["id"], entry["repository"], entry["commit"]) == (ID, ID, commit)
    assert httpx.get(f"{server.url}/v1/models/{ID}", timeout=30).json() == entry
    stats = server.stats()
    assert (stats["model_name"], stats["repository"], stats["commit"]) == (ID, ID, commit)
    answer = httpx.post(f"{server.url}/generate", json=ASK | {"model": ID}, timeout=60)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def test_a_server_fetches_its_model_and_a_restart_has_the_same_commit_without_network(
    hub: Hub, model: Path, tmp_path: Path
) -> None:
    with served(tmp_path / "folder.log", "--model", str(model)) as server:
        (entry,) = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"]
        assert (entry["repository"], entry["commit"]) == (None, None)
        expected = httpx.post(f"{server.url}/generate", json=ASK, timeout=60).json()["choices"][0]["token_ids"]
    log, environment = tmp_path / "log", environment_of(hub, tmp_path)
    with served(log, "--model", ID, environment=environment) as server:
        assert check_served(server, COMMIT) == expected
        storage = tmp_path / "hub" / "models--zai-org--GLM-Small"
        assert f"model {ID}, commit {COMMIT}, in {storage}/snapshots/{COMMIT}" in log.read_text()
        assert f"{ID} at commit {COMMIT}: " in log.read_text()
        hub.revisions["main"] = NEXT_COMMIT
        (storage / "refs" / "main").write_text(NEXT_COMMIT)
        hub.num_questions = 0
        hub.refusals = [503] * 100
        os.kill(server.engine_pid(), signal.SIGKILL)
        wait_for(lambda: is_restarted(server), "the restart", 120)
        assert check_served(server, COMMIT) == expected
        assert hub.num_questions == 0


def is_restarted(server: Served) -> bool:
    """Whether the server is ready for the second time."""
    answer = httpx.get(f"{server.url}/ready", timeout=30)
    return answer.status_code == 200 and answer.json()["restarts"] == 1


def test_a_server_whose_model_cannot_be_fetched_ends_with_one_sentence(hub: Hub, tmp_path: Path) -> None:
    for text, sentence in (("a/b", "shows no model a/b"), (f"{ID}@gone", "has no revision 'gone'")):
        log = tmp_path / "log"
        server = start(log, "--model", text, environment=environment_of(hub, tmp_path), wait=False)
        assert server.process.wait(120) == 1
        assert log.read_text().count(sentence) == 1 and "Traceback" not in log.read_text()
        log.unlink()


def test_a_server_that_is_stopped_while_it_fetches_ends_and_the_next_one_fetches_the_rest(
    hub: Hub, tmp_path: Path
) -> None:
    environment = environment_of(hub, tmp_path)
    hub.hold_after_bytes = 0
    server = start(tmp_path / "first.log", "--model", ID, environment=environment, wait=False)
    assert hub.is_held.wait(120)
    assert httpx.get(f"{server.url}/health", timeout=30).json()["phase"] == "loading"
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    hub.hold_after_bytes = None
    hub.is_closed.set()
    with served(tmp_path / "second.log", "--model", ID, environment=environment) as second:
        check_served(second, COMMIT)
    assert not list(tmp_path.rglob("*.incomplete"))


def test_llm_and_the_commands_take_an_id(hub: Hub, tmp_path: Path) -> None:
    environment = os.environ | environment_of(hub, tmp_path) | {"PYTHONPATH": str(ROOT)}

    def call(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    repository, commit, *tokens = call("-c", PROGRAM, ID).split()
    assert (repository, commit, len(tokens)) == (ID, COMMIT, 4)
    fetched = len(hub.fetched)
    folder = call("-m", "glint", "download", ID).strip()
    assert folder == str(tmp_path / "hub" / "models--zai-org--GLM-Small" / "snapshots" / COMMIT)
    flags = ("--prompt-tokens", "8", "--decode-tokens", "2")
    assert folder in call("-m", "glint", "bench", "cpu", "--model", f"{ID}@{COMMIT}", *flags)
    assert len(hub.fetched) == fetched
