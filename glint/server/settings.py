"""Settings of a server: frozen, and complete once constructed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glint.server.auth import ApiKeys, check_origins
from glint.server.http.origin import AllowedHosts, is_loopback
from glint.server.limits import Limits


@dataclass(frozen=True)
class ServerSettings:
    """Everything that `glint serve` is told.

    `engine_options` are those of `glint.sizing.size_engine`. `model_names` are the names that clients may use, the
    first being the one that answers carry. A server whose work makes no step for `health_seconds` is unhealthy. After
    the first SIGTERM requests in flight have `drain_seconds` to end. `hosts` are names besides those of this machine
    that the server answers to, `origins` the web pages of other sites that may call it. With `allows_special_tokens`
    control tokens that messages spell become control tokens.
    """

    model_dir: Path
    model_names: tuple[str, ...]
    keys: ApiKeys
    engine_options: dict[str, Any] = field(default_factory=dict)
    library_path: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    limits: Limits = field(default_factory=Limits)
    guards_metrics: bool = True
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    log_level: str = "info"
    logs_json: bool = False
    health_seconds: float = 60.0
    drain_seconds: float = 60.0
    allows_special_tokens: bool = False

    def __post_init__(self) -> None:
        check_origins(self.origins)
        AllowedHosts(self.host, self.hosts)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is unsafe about these settings."""
        if is_loopback(self.host) or len(self.keys) > 0:
            return self.keys.warnings
        message = f"listening on {self.host} without an API key: whoever reaches the port may use the model"
        if not self.hosts:
            message += ", and so may web pages that lead a name of theirs here, unless --allowed-hosts names yours"
        return (*self.keys.warnings, f"{message}; set GLINT_API_KEY or --api-key-file")
