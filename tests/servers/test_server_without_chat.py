"""A model folder without a chat template: completions are served, every chat route says what is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.served import Served, served


@pytest.fixture(scope="module")
def chatless(sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server on a copy of the sample model without a chat template."""
    folder = tmp_path_factory.mktemp("chatless") / "plain"
    folder.mkdir()
    for file in sample_model.iterdir():
        if file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file)
    settings = json.loads((sample_model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with served(folder.parent / "server.log", str(folder)) as running:
        yield running


def test_a_folder_without_a_chat_template_still_completes(chatless: Served) -> None:
    with openai.OpenAI(base_url=f"{chatless.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        with pytest.raises(openai.BadRequestError, match=r"chat_template\.jinja") as refused:
            client.chat.completions.create(model="plain", messages=[{"role": "user", "content": "Hi"}])
        assert str(chatless.log.parent) not in refused.value.message
        answer = client.completions.create(
            model="plain", prompt="The capital of France is", max_tokens=4, temperature=0
        )
        assert "Paris" in answer.choices[0].text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"model": "plain", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/messages/count_tokens", {"model": "plain", "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"model": "plain", "input": "Hi"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_every_chat_route_names_the_missing_file(chatless: Served, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{chatless.url}{path}", json=body, timeout=60)
    assert answer.status_code == 400
    assert "chat_template.jinja" in answer.json()["error"]["message"]
    assert str(chatless.log.parent) not in answer.text
