"""Settings of a server: immutable, and checked when they are made."""

from dataclasses import dataclass, field
from pathlib import Path

from glint.engine.args import EngineArgs
from glint.errors import RequestError
from glint.sampling import TOKEN_LIMIT
from glint.server.auth import AdminAccess, ApiKeys, check_origins
from glint.server.http.origin import AllowedHosts, is_loopback
from glint.server.http.tls import TlsFiles
from glint.server.limits import Limits


@dataclass(frozen=True)
class ServerSettings:
    """All settings of `glint serve`.

    Clients may use any of `model_names`; responses carry the first. A model that came by its id has a `repository` and
    a `commit` of the hub. A server that has work and completes no step for `health_seconds` is unhealthy. After the
    first SIGTERM requests in flight have `drain_seconds` to end. The server answers to `hosts` besides the names of
    this machine, and to web pages of `origins`. With `allows_special_tokens` it reads control tokens in the text of
    messages, and with `serves_web` it has pages. No request thinks for more than `max_thinking_tokens`; a budget ends
    thinking with `thinking_closing_text`, unless the request has its own text. The server keeps up to
    `stored_responses` responses of /v1/responses. With `tls` it speaks HTTPS. With `uds` it listens on that path, made
    with `uds_mode`, instead of `host` and `port`.
    """

    model_dir: Path
    model_names: tuple[str, ...]
    keys: ApiKeys
    repository: str | None = None
    commit: str | None = None
    engine_args: EngineArgs = field(default_factory=EngineArgs)
    library_path: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    limits: Limits = field(default_factory=Limits)
    guards_metrics: bool = True
    serves_web: bool = True
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    log_level: str = "info"
    logs_json: bool = False
    health_seconds: float = 60.0
    drain_seconds: float = 60.0
    allows_special_tokens: bool = False
    max_thinking_tokens: int | None = None
    thinking_closing_text: str = ""
    stored_responses: int = 0
    tls: TlsFiles | None = None
    uds: Path | None = None
    uds_mode: int = 0o600

    def __post_init__(self) -> None:
        check_origins(self.origins)
        AllowedHosts(self.bind, self.hosts)
        if self.max_thinking_tokens is not None and not 0 <= self.max_thinking_tokens < TOKEN_LIMIT:
            asked = f"--max-thinking-tokens is {self.max_thinking_tokens}"
            raise RequestError(f"{asked}; it must be an integer from 0 to {TOKEN_LIMIT - 1}")

    @property
    def bind(self) -> str:
        """What the server listens on: an address, or the path of a Unix socket."""
        return self.host if self.uds is None else str(self.uds)

    @property
    def scheme(self) -> str:
        """The scheme of the server's addresses."""
        return "http" if self.tls is None else "https"

    @property
    def address(self) -> str:
        """Where clients find the server."""
        return f"{self.scheme}://{self.host}:{self.port}" if self.uds is None else f"{self.scheme}+unix:{self.uds}"

    @property
    def admin_access(self) -> AdminAccess:
        """Who may list and cancel requests besides the holder of an admin key.

        "keys": the holder of each key its own. "local": everybody, as only this machine reaches the server. "admin" and
        "closed": nobody else; with "closed" there is no admin key either. A server with names of its own is behind a
        proxy, wherever it listens.
        """
        if len(self.keys) > 0:
            return "keys"
        if self.keys.has_admin:
            return "admin"
        return "local" if is_loopback(self.bind) and not self.hosts else "closed"

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about unsafe settings."""
        if self.uds is not None or is_loopback(self.host) or len(self.keys) > 0:
            return self.keys.warnings
        message = f"listening on {self.host} without an API key: anybody who reaches the port may use the model"
        if not self.hosts:
            message += ", and so may web pages by DNS rebinding, unless --allowed-hosts is set"
        return (*self.keys.warnings, f"{message}; set GLINT_API_KEY or --api-key-file")
