"""The pages of the server: static files of the package, read once, which need no key.

`/` is `index.html` for a client that accepts HTML, so that a program still gets the list of routes there. Every other
`NAME.html` is `/NAME`, and every other file `/web/NAME`.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

FOLDER = Path(__file__).resolve().parents[1] / "web"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
ROOT_PAGE = "index.html"


@dataclass(frozen=True)
class WebFile:
    """One file as it is sent. A browser keeps it and asks with its `etag` whether it is still the same."""

    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    etag: bytes


def read_files(folder: Path = FOLDER) -> dict[str, WebFile]:
    """The files of a folder by the path that serves them."""
    return {_path_of(file.name): _read(file) for file in sorted(folder.iterdir()) if file.suffix in TYPES}


def _path_of(name: str) -> str:
    if name == ROOT_PAGE:
        return "/"
    return "/" + name.removesuffix(".html") if name.endswith(".html") else f"/web/{name}"


def _read(file: Path) -> WebFile:
    body = file.read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    named = HEADERS | {"content-type": TYPES[file.suffix], "etag": etag}
    if file.name == ROOT_PAGE:
        named["vary"] = "Accept"
    headers = tuple((name.encode(), value.encode()) for name, value in named.items())
    return WebFile(body, headers, etag.encode())


def page_addresses(scheme: str, host: str, port: int, files: Iterable[str]) -> list[str]:
    """The addresses of the pages, the chat first, for a person on the machine of the server."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    base = f"{scheme}://[{name}]:{port}" if ":" in name else f"{scheme}://{name}:{port}"
    return [base + path for path in sorted(files) if not path.startswith("/web/")]


class WebFiles:
    """ASGI middleware that answers GET and HEAD of a known file, and passes every other request on."""

    def __init__(self, app: ASGIApp, files: Mapping[str, WebFile]) -> None:
        self._app = app
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or pass on."""
        file = self._find(scope) if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") else None
        if file is None:
            await self._app(scope, receive, send)
            return
        is_known = file.etag in _header(scope, b"if-none-match")
        length = [] if is_known else [(b"content-length", str(len(file.body)).encode())]
        status = 304 if is_known else 200
        await send({"type": "http.response.start", "status": status, "headers": [*file.headers, *length]})
        await send({"type": "http.response.body", "body": b"" if is_known else file.body})

    def _find(self, scope: Scope) -> WebFile | None:
        if scope["path"] == "/" and b"text/html" not in _header(scope, b"accept"):
            return None
        return self._files.get(scope["path"])


def _header(scope: Scope, wanted: bytes) -> bytes:
    return b", ".join(value for name, value in scope["headers"] if name == wanted)
