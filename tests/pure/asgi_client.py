"""One request to an application, without a server."""

from __future__ import annotations

import asyncio

import httpx
from starlette.types import ASGIApp


def call(app: ASGIApp, path: str = "/", method: str = "GET", **headers: str) -> httpx.Response:
    """The answer to a request; an underscore in the name of a header stands for a hyphen."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, path, headers=named)

    return asyncio.run(run())
