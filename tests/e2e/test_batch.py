"""A batch from end to end: OpenAI's own types read its answers, and a run that was stopped goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from tests.e2e.commands import ROOT, glint
from tests.e2e.served import Served

CHAT = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}
TYPES = {"/v1/chat/completions": ChatCompletion, "/v1/completions": Completion, "/v1/responses": Response}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "text": ("/v1/completions", {"prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}),
    "response": ("/v1/responses", {"input": "Say hello.", "max_output_tokens": 6}),
    "refused": ("/v1/chat/completions", {**CHAT, "temperature": -1}),
}


def write_input(file: Path, **requests: tuple[str, dict[str, Any]]) -> None:
    """Writes an input for the model that is served as "sample"."""
    lines = [
        {"custom_id": name, "method": "POST", "url": url, "body": {"model": "sample", **body}}
        for name, (url, body) in requests.items()
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_output(file: Path) -> dict[str, dict[str, Any]]:
    """The lines of an output by custom_id."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def test_answers_are_those_of_the_server_and_a_second_run_goes_on(
    tmp_path: Path, sample_model: Path, server: Served, client: openai.OpenAI
) -> None:
    asked, written = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_input(asked, **BODIES)
    command = ("batch", asked, written, "--model", sample_model, "--served-model-name", "sample")
    ended = glint(*command)
    assert ended.returncode == 1 and "4 requests are answered" in ended.stderr and "1 failed" in ended.stderr
    lines = read_output(written)
    assert lines.keys() == BODIES.keys()
    for name, (url, _) in BODIES.items():
        response = lines[name]["response"]
        assert lines[name]["id"].startswith("batch_req_") and lines[name]["error"] is None
        assert response["status_code"] == (400 if name == "refused" else 200)
        if name != "refused":
            assert TYPES[url].model_validate(response["body"], strict=True).id == response["request_id"]
    assert lines["refused"]["response"]["body"]["error"]["param"] == "temperature"
    direct = client.chat.completions.create(model=server.model, **CHAT)
    assert lines["chat"]["response"]["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content

    whole = [line for line in written.read_text().splitlines(keepends=True) if '"custom_id":"chat"' not in line]
    written.write_text("".join(whole) + whole[0][:40])
    again = glint(*command)
    assert again.returncode == 1 and "4 requests are answered" in again.stderr and "3 of them before" in again.stderr
    assert written.read_text().startswith("".join(whole))
    content = read_output(written)["chat"]["response"]["body"]["choices"][0]["message"]["content"]
    assert content == direct.choices[0].message.content


def test_ctrl_c_leaves_a_file_that_goes_on(tmp_path: Path, sample_model: Path) -> None:
    asked, written = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "Once", "temperature": 0, "ignore_eos": True}
    requests = {str(index): ("/v1/completions", {**body, "max_tokens": 2 + 60 * (index % 2)}) for index in range(12)}
    write_input(asked, **requests)
    flags = ("--model", str(sample_model), "--served-model-name", "sample", "--max-num-seqs", "2")
    command = [sys.executable, "-m", "glint", "batch", str(asked), str(written), *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while not (written.exists() and written.read_bytes().count(b"\n")):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 130 and "run it again to go on" in error and "Traceback" not in error
    first = written.read_text()
    assert 0 < first.count("\n") < 12
    ended = glint("batch", asked, written, *flags)
    assert ended.returncode == 0, ended.stderr
    assert written.read_text().startswith(first) and len(read_output(written)) == 12


def test_a_chat_with_a_server_says_what_the_server_says(server: Served, client: openai.OpenAI) -> None:
    direct = client.chat.completions.create(model=server.model, **CHAT)
    flags = ("--max-tokens", "8", "--temperature", "0")
    ended = glint("chat", "--url", f"{server.url}/v1", *flags, stdin="Say hello.\n/exit\n")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{direct.choices[0].message.content}\n"
    assert "[8 tokens, the first after " in ended.stderr
    refused = glint("chat", "--url", server.url, "--model", "nobody", *flags, stdin="Say hello.\n")
    assert refused.returncode == 0 and "HTTP 404: the model 'nobody' is not served here" in refused.stderr
