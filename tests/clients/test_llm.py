"""llm: prompts, systems, conversations, schemas, tools and logs of the command, and its Python interface."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.clients import server

GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", "16")


@pytest.fixture(scope="module")
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the command that knows the server as three models."""
    folder = tmp_path_factory.mktemp("llm")
    shared = {"model_name": server.MODEL, "api_base": server.URL, "api_key_name": "glint"}
    kinds = {
        "glint": {"supports_schema": True, "supports_tools": True},
        "glint-text": {"completion": True},
        "glint-responses": {"responses": True},
    }
    models = [{"model_id": name} | shared | settings for name, settings in kinds.items()]
    (folder / "extra-openai-models.yaml").write_text(yaml.safe_dump(models))
    run(folder, "keys", "set", "glint", "--value", server.KEY)
    return folder


def run(folder: Path, *words: str, status: int = 0, typed: str = "") -> str:
    """What the command prints, without the space at its ends."""
    environment = os.environ | {"LLM_USER_PATH": str(folder)}
    command = [sys.executable, "-m", "llm", *words]
    done = subprocess.run(command, env=environment, input=typed, capture_output=True, text=True, timeout=180)
    assert done.returncode == status, done.stderr
    return (done.stdout if status == 0 else done.stderr).strip()


@pytest.mark.parametrize("words", [(), ("--no-stream",)])
@pytest.mark.parametrize("model", ["glint", "glint-responses"])
def test_a_prompt(user_folder: Path, model: str, words: tuple[str, ...]) -> None:
    assert run(user_folder, "-m", model, server.QUESTION, *GREEDY, *words) == server.chat_text().strip()


def test_a_conversation_and_its_log(user_folder: Path) -> None:
    first = run(user_folder, "-m", "glint", "-s", "You are brief.", server.QUESTION, *GREEDY)
    system = {"role": "system", "content": "You are brief."}
    question = {"role": "user", "content": server.QUESTION}
    direct = server.chat(system, question)
    said = direct["choices"][0]["message"]["content"]
    assert first == said.strip()
    (entry,) = json.loads(run(user_folder, "logs", "-n", "1", "--json"))
    assert entry["response"] == said and entry["input_tokens"] == direct["usage"]["prompt_tokens"]
    assert entry["output_tokens"] == direct["usage"]["completion_tokens"]
    second = run(user_folder, "-c", "And two more?", *GREEDY)
    history = [system, question, {"role": "assistant", "content": said}, {"role": "user", "content": "And two more?"}]
    assert second == server.chat_text(*history).strip()


def test_a_chat(user_folder: Path) -> None:
    told = run(user_folder, "chat", "-m", "glint", *GREEDY, typed=f"{server.QUESTION}\nquit\n")
    assert server.chat_text().strip() in told


def test_a_schema(user_folder: Path) -> None:
    words = ("--schema", "name, is_capital bool", "Describe Oslo as JSON.", "-o", "temperature", "0")
    town = json.loads(run(user_folder, "-m", "glint", *words, "-o", "max_tokens", "200"))
    assert set(town) >= {"name", "is_capital"} and isinstance(town["is_capital"], bool)


def test_a_tool_is_offered(user_folder: Path) -> None:
    function = "def multiply(x: int, y: int) -> int:\n    'Multiply two numbers.'\n    return x * y\n"
    told = run(user_folder, "-m", "glint", "--functions", function, "What is 3 times 4?", *GREEDY)
    (entry,) = json.loads(run(user_folder, "logs", "-n", "1", "--json"))
    assert told == entry["response"].strip() and [tool["name"] for tool in entry["tools"]] == ["multiply"]


def test_a_completion(user_folder: Path) -> None:
    words = ("-m", "glint-text", server.PROMPT, "-o", "temperature", "0", "-o", "max_tokens", "8")
    expected = server.complete()["choices"][0]["text"].strip()
    assert run(user_folder, *words) == run(user_folder, *words, "--no-stream") == expected


def test_the_python_interface(user_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(user_folder))
    import llm

    answer = llm.get_model("glint").prompt(server.QUESTION, temperature=0, max_tokens=16)
    assert "".join(answer) == answer.text() == server.chat_text() and answer.usage().output == 16

    async def asked() -> str:
        return await llm.get_async_model("glint").prompt(server.QUESTION, temperature=0, max_tokens=16).text()

    assert asyncio.run(asked()) == server.chat_text()


def test_errors_are_told(user_folder: Path) -> None:
    assert "no valid API key" in run(user_folder, "-m", "glint", "--key", "wrong", server.QUESTION, status=1)
    assert "too long" in run(user_folder, "-m", "glint", server.TOO_LONG, status=1)
