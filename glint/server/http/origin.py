"""Which host names the server answers to, and which web pages may call it from a browser.

A browser sends the host name that it called as `Host` and the site of the calling page as `Origin`; a page can change
neither. So Origin reveals a page of another site, and Host reveals a page whose own name resolves to this machine (DNS
rebinding). Clients other than browsers send no Origin.
"""

import re
from collections.abc import Callable, Sequence
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from glint.errors import RequestError
from glint.server.http.body import shorten
from glint.server.http.problems import Problem, send_problem

ANY = "*"
DEFAULT_PORTS = {"http": 80, "https": 443}
MAX_PORT = 65535

_HOST = re.compile(r"(?P<name>[a-z0-9._-]{1,255}|\[[0-9a-f:.]{2,45}\])(?::(?P<port>[0-9]{0,5}))?", re.IGNORECASE)
_ORIGIN = re.compile(r"(?P<scheme>https?)://(?P<host>.*)", re.IGNORECASE)
_ABSOLUTE_TARGET = re.compile(rb"https?://(?P<authority>[^/?#]*)", re.IGNORECASE)
_CLOSE = {"Connection": "close"}


class Host(NamedTuple):
    """A host: a name in lower case or an address in canonical form, and the port if there is one."""

    name: str
    port: int | None


def parse_host(text: str) -> Host | None:
    """Parse `NAME`, `NAME:PORT`, `ADDRESS:PORT` or `[ADDRESS]:PORT`; None where the text is malformed."""
    match = _HOST.fullmatch(text)
    if match is None:
        return None
    name = match["name"].lower()
    port = int(match["port"]) if match["port"] else None
    if port is not None and port > MAX_PORT:
        return None
    if name.startswith("["):
        try:
            return Host(str(IPv6Address(name[1:-1])), port)
        except ValueError:
            return None
    name = name.removesuffix(".")
    return Host(name, port) if all(name.split(".")) else None


def is_loopback(name: str) -> bool:
    """Whether a name or an address always means the machine itself."""
    name = name.lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


class AllowedHosts:
    """The host names that a server answers to: loopback names and the configured ones.

    A configured name matches itself with any port, `*.internal` every name that ends so, `*` all names. A server that
    listens on another address than loopback, without configured names, answers to all.
    """

    def __init__(self, bind: str, patterns: Sequence[str] = ()) -> None:
        names = [_parse_pattern(pattern) for pattern in patterns if pattern != ANY]
        self._takes_all = ANY in patterns or not (patterns or is_loopback(bind))
        self._names = frozenset(names)
        self._endings = tuple(name for name in names if name.startswith("."))

    def allows(self, name: str) -> bool:
        """Whether the server answers to a name."""
        return self._takes_all or is_loopback(name) or name in self._names or name.endswith(self._endings)


def _parse_pattern(pattern: str) -> str:
    """A configured name in the form of a `Host` name; of `*.internal` the ending `.internal`."""
    host = parse_host(pattern.removeprefix("*."))
    if host is None or host.port is not None:
        raise RequestError(
            f"--allowed-hosts has {pattern!r}; give names without scheme, port and path, such as chat.internal, "
            "*.internal or [fd00::1], or '*' for all"
        )
    return f".{host.name}" if pattern.startswith("*.") else host.name


def is_same_origin(origin: str, host: Host) -> bool:
    """Whether a page was served under the host that it now calls.

    A proxy may have ended TLS, so the scheme is that of the page; it decides the port where none is written.
    """
    match = _ORIGIN.fullmatch(origin)
    if match is None or (page := parse_host(match["host"])) is None:
        return False
    default = DEFAULT_PORTS[match["scheme"].lower()]
    return (page.name, page.port or default) == (host.name, host.port or default)


def use_target_host(target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Replace the Host header by the host of the request target where that is an absolute URL, as for proxies."""
    match = _ABSOLUTE_TARGET.match(target)
    if match is not None:
        headers[:] = [(name, match["authority"] if name == b"host" else value) for name, value in headers]


class SiteGuard:
    """ASGI middleware that refuses a request with a foreign Host or Origin before its body is read.

    A request without Origin does not come from a page, or its page cannot read the response; a POST of a page always
    has one. The middleware calls `on_refusal` for every request that it refuses. It remembers the last Host that it let
    through, which most clients share.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: AllowedHosts,
        origins: Sequence[str] = (),
        on_refusal: Callable[[Scope, Problem], None] | None = None,
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = frozenset(origins)
        self._on_refusal = on_refusal
        self._last: tuple[str, Host] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with 400 or 403."""
        problem = self._find_problem(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        if self._on_refusal is not None:
            self._on_refusal(scope, problem)
        await send_problem(send, scope["path"], problem)

    def _find_problem(self, scope: Scope) -> Problem | None:
        sent = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        host = None
        if sent or scope.get("http_version") != "1.0":
            if len(sent) == 1 and self._last is not None and self._last[0] == sent[0]:
                host = self._last[1]
            else:
                host = parse_host(sent[0]) if len(sent) == 1 else None
                if host is None:
                    return _malformed(sent)
                if not self._hosts.allows(host.name):
                    return _foreign_host(host.name)
                self._last = sent[0], host
        if not origins or ANY in self._origins:
            return None
        is_own = len(origins) == 1 and host is not None and is_same_origin(origins[0], host)
        return None if is_own or self._origins.issuperset(origins) else _foreign_origin(origins[0])


def _malformed(sent: Sequence[str]) -> Problem:
    what = f"is sent {len(sent)} times" if len(sent) > 1 else f"is '{shorten(sent[0])}'" if sent else "is missing"
    message = f"the Host header {what}; send exactly one, with the host and port of the server's address"
    return Problem(400, message, code="invalid_host", headers=_CLOSE)


def _foreign_host(name: str) -> Problem:
    message = f"the server does not answer to the host '{name}'; to change that, start it with --allowed-hosts {name}"
    return Problem(403, message, code="host_not_allowed", headers=_CLOSE)


def _foreign_origin(origin: str) -> Problem:
    allowed = shorten(origin) if _ORIGIN.fullmatch(origin) else "'*'"
    message = (
        f"the request comes from a web page of '{shorten(origin)}', which is not this server; to let such pages "
        f"call it, start it with --allowed-origins {allowed}"
    )
    return Problem(403, message, code="origin_not_allowed", headers=_CLOSE)
