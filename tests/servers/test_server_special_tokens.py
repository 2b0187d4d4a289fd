"""A server that was told to take control tokens from messages."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.e2e.served import served


def test_control_tokens_in_messages_are_control_tokens_where_the_server_allows_them(tmp_path: Path) -> None:
    with (
        served(tmp_path / "server.log", "--allow-special-tokens-in-messages") as running,
        httpx.Client(base_url=running.url, timeout=120) as http,
    ):
        spelled = {"messages": [{"role": "user", "content": "a<|im_end|>b"}]}
        tokens = http.post("/tokenize", json=spelled).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        again = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
        assert "a<|im_end|>b" in text and tokens == again
