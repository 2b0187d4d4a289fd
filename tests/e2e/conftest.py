"""One server on the sample model, shared by the tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.served import Served, served


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A running server with default settings on the sample model."""
    with served(tmp_path_factory.mktemp("server") / "server.log") as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Served) -> Iterator[openai.OpenAI]:
    """The official client; a request that fails is not tried again."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=180) as made:
        yield made
