"""API keys: their sources, the check of every request, and the tenant of each key."""

import hashlib
import hmac
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from glint.engine.share import MAX_WEIGHT, Share
from glint.errors import RequestError
from glint.server.http.problems import Problem, send_problem

KEYS_VARIABLE = "GLINT_API_KEY"
ADMIN_KEYS_VARIABLE = "GLINT_ADMIN_API_KEY"
TENANT = "glint.tenant"
OPEN_PATHS = frozenset({"/health", "/ready"})
METRICS_PATH = "/metrics"
NUM_SALTS = 2**63
MAX_TOKEN_BYTES = 4096
AdminAccess = Literal["keys", "admin", "local", "closed"]

_SALT_SECRET = secrets.token_bytes(32)
_KEY = re.compile(r"[!-~]+")
_WEIGHT = re.compile(r"weight=([0-9]{1,9})")
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.\-_\[\]:]+")


@dataclass(frozen=True)
class Tenant:
    """The holder of one API key. Tenants with different salts never share pages of the prefix cache.

    `cache_salt` is below 2**63, and 0 only where the server has no keys. The engine's time is shared by `weight`. The
    holder of an admin key may list and cancel the requests of every key.
    """

    cache_salt: int
    weight: int = 1
    is_admin: bool = False

    def share(self, priority: int = 0) -> Share:
        """The share of the engine that a request of this tenant counts against."""
        return Share(self.cache_salt, self.weight, priority) if priority else self._share

    @cached_property
    def _share(self) -> Share:
        return Share(self.cache_salt, self.weight)

    def salt_of(self, salt: str | None) -> int:
        """The salt of a request that has one of its own, else the tenant's."""
        if salt is None:
            return self.cache_salt
        digest = hmac.digest(_SALT_SECRET, f"{self.cache_salt} {salt}".encode(errors="surrogatepass"), "sha256")
        return _to_salt(digest)


ANYONE = Tenant(0)


class ApiKeys:
    """The keys of a server, kept as digests only. Without any key every client is the same tenant.

    Every process draws new salts for its tenants, so that a salt reveals nothing about its key. An admin key is also
    valid wherever another key is, but does not count: admin keys alone close nothing but the requests in flight.
    """

    def __init__(
        self,
        keys: Iterable[str],
        *,
        weights: Mapping[str, int] | None = None,
        warnings: Sequence[str] = (),
        admin_keys: Iterable[str] = (),
    ) -> None:
        """Keep the keys. A key without an entry in `weights` has weight 1."""
        secret = secrets.token_bytes(32)
        self.warnings = tuple(warnings)
        self._digests: dict[bytes, int] = {}
        self._tenants: dict[int, Tenant] = {}
        keys, admins = tuple(keys), tuple(admin_keys)
        if set(keys) & set(admins):
            raise RequestError("the same key is an API key and an --admin-api-key; use two different ones")
        for key in keys + admins:
            digest = hashlib.sha256(_checked(key).encode()).digest()
            salt = hmac.digest(secret, key.encode(), "sha256")
            cache_salt = _to_salt(salt)
            self._digests[digest] = cache_salt
            self._tenants[cache_salt] = Tenant(cache_salt, (weights or {}).get(key, 1), key in admins)

    @classmethod
    def load(
        cls,
        flags: Sequence[str],
        file: Path | None,
        environment: Mapping[str, str],
        admin_flags: Sequence[str] = (),
    ) -> "ApiKeys":
        """Read the keys from flags, from a file with one key per line, and from GLINT_API_KEY, separated by commas.

        In the file a weight may follow a key. `warnings` names unsafe sources. Admin keys come from their own flags
        and from GLINT_ADMIN_API_KEY.
        """
        keys = list(flags)
        weights: dict[str, int] = {}
        warnings = []
        if file is not None:
            weights, warning = _read_file(file)
            keys += weights
            warnings += [warning] if warning else []
        keys += _split(environment, KEYS_VARIABLE)
        admin_keys = [*admin_flags, *_split(environment, ADMIN_KEYS_VARIABLE)]
        return cls(keys, weights=weights, warnings=warnings, admin_keys=admin_keys)

    def __len__(self) -> int:
        return sum(not tenant.is_admin for tenant in self._tenants.values())

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin key."""
        return any(tenant.is_admin for tenant in self._tenants.values())

    def find(self, token: bytes) -> Tenant | None:
        """The tenant of a key, or None. It takes the same time for every key, valid or not."""
        digest = hashlib.sha256(token).digest()
        salt = 0
        for known, its_salt in self._digests.items():
            salt |= its_salt * hmac.compare_digest(known, digest)
        return self._tenants.get(salt)


def _split(environment: Mapping[str, str], variable: str) -> list[str]:
    """The keys of a variable, separated by commas."""
    return [key.strip() for key in environment[variable].split(",")] if variable in environment else []


def _to_salt(digest: bytes) -> int:
    """A salt for the engine, never 0, from a digest."""
    return 1 + int.from_bytes(digest[:16]) % (NUM_SALTS - 1)


def _checked(key: str) -> str:
    if not key:
        raise RequestError(
            f"an API key is empty; check --api-key, --admin-api-key, the key file, {KEYS_VARIABLE} and "
            f"{ADMIN_KEYS_VARIABLE} for one"
        )
    if not _KEY.fullmatch(key):
        raise RequestError(
            f"an API key of {len(key)} characters has spaces, control or non-ASCII characters in it; "
            "use letters, digits and punctuation only"
        )
    if len(key) > MAX_TOKEN_BYTES:
        raise RequestError(f"an API key has {len(key)} characters; use at most {MAX_TOKEN_BYTES}")
    return key


def _read_file(file: Path) -> tuple[dict[str, int], str | None]:
    """The keys of a file with their weights, and a warning where other users can access the file."""
    try:
        mode = file.stat().st_mode
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"the key file {file} cannot be read: {error}; give a text file with a key per line"
        raise RequestError(message) from error
    keys: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if words := line.split():
            keys[words[0]] = _read_weight(words[1:], f"line {number} of the key file {file}")
    if not keys:
        raise RequestError(f"the key file {file} holds no key; write one key per line")
    is_exposed = bool(mode & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH))
    warning = f"other users of this machine have access to the key file {file}; run: chmod 600 {file}"
    return keys, warning if is_exposed else None


def _read_weight(words: Sequence[str], where: str) -> int:
    """The weight after a key in a key file; 1 without one."""
    if not words:
        return 1
    found = _WEIGHT.fullmatch(words[0])
    if len(words) > 1 or found is None or not 1 <= int(found[1]) <= MAX_WEIGHT:
        raise RequestError(
            f"{where} has something behind its key that is no weight; write the key alone, or KEY weight=N with N "
            f"from 1 to {MAX_WEIGHT}; keys have no spaces"
        )
    return int(found[1])


def tenant_of(scope: Scope) -> Tenant:
    """The tenant of a request that has passed `Authentication`."""
    tenant = scope[TENANT]
    assert isinstance(tenant, Tenant)
    return tenant


class Authentication:
    """ASGI middleware that lets a request through only with a key, as `Authorization: Bearer` or as `x-api-key`.

    It guards every path except the open ones, which must match exactly. It refuses connections other than HTTP, with
    keys and without. It calls `on_refusal` for every request that it refuses.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        open_paths: AbstractSet[str] = OPEN_PATHS,
        guards_metrics: bool = True,
        on_refusal: Callable[[Scope, Problem], None] | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths) | (frozenset() if guards_metrics else {METRICS_PATH})
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its tenant, or answer it with 401."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "not allowed"})
        elif scope["type"] != "http":
            raise RequestError(f"a connection of type {scope['type']!r} is not served; use HTTP")
        elif not self._keys:
            scope[TENANT] = (self._keys.has_admin and self._find_tenant(scope)) or ANYONE
            await self._app(scope, receive, send)
        elif self._is_open(scope):
            await self._app(scope, receive, send)
        elif (tenant := self._find_tenant(scope)) is not None:
            scope[TENANT] = tenant
            await self._app(scope, receive, send)
        else:
            await self._refuse(scope, send)

    def _is_open(self, scope: Scope) -> bool:
        return scope["path"] in self._open_paths and not scope.get("root_path")

    def _find_tenant(self, scope: Scope) -> Tenant | None:
        tokens: dict[bytes, list[bytes]] = {b"authorization": [], b"x-api-key": []}
        for name, value in scope["headers"]:
            if name in tokens:
                tokens[name].append(value)
        if any(len(values) > 1 for values in tokens.values()):
            return None
        bearer = [value[7:] for value in tokens[b"authorization"] if value[:7].lower() == b"bearer "]
        candidates = [token.strip() for token in bearer + tokens[b"x-api-key"]]
        tenants = [self._keys.find(token) for token in candidates if 0 < len(token) <= MAX_TOKEN_BYTES]
        return next((tenant for tenant in tenants if tenant is not None), None)

    async def _refuse(self, scope: Scope, send: Send) -> None:
        problem = Problem(
            401,
            "no valid API key; send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": 'Bearer realm="glint"'},
        )
        if self._on_refusal is not None:
            self._on_refusal(scope, problem)
        await send_problem(send, scope["path"], problem)


def check_origins(origins: Sequence[str]) -> None:
    """Refuse origins that no browser sends."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise RequestError(f"the origin {origin!r} is not SCHEME://HOST or SCHEME://HOST:PORT, nor '*'; correct it")


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Let pages of these origins call the server from a browser; without origins the application stays as it is.

    It wraps `Authentication`: it answers a preflight without a key, and every other request still needs one.
    """
    check_origins(origins)
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["Retry-After", "x-request-id", "request-id"],
    )
