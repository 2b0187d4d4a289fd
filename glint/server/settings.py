"""Settings of a server: frozen, and complete once constructed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glint.server.auth import ApiKeys
from glint.server.bounds import Limits


@dataclass(frozen=True)
class ServerSettings:
    """Everything that `glint serve` is told.

    `engine_options` are those of `glint.sizing.size_engine`. `model_names` are the names that clients may use, the
    first being the one that answers carry. A server whose work makes no step for `health_seconds` is unhealthy. After
    the first SIGTERM requests in flight have `drain_seconds` to end.
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
    log_level: str = "info"
    logs_json: bool = False
    health_seconds: float = 60.0
    drain_seconds: float = 60.0
