"""The outcome of each request: exactly one line in the log, whatever happened."""

import json
import logging
import re
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

Outcome = Literal["finished", "stopped", "length", "cancelled", "refused", "failed", "lost"]
OutcomeValue = str | int | float | None

MAX_TEXT_CHARS = 200
LOGGER_NAME = "glint.requests"
FAILURES = ("failed", "lost")
OUTCOMES = frozenset(get_args(Outcome))

_PLAIN = re.compile(r"(?!-$)[\w./:+@-]+", re.ASCII)


@dataclass(frozen=True)
class RequestOutcome:
    """The end of one HTTP request. A figure that is not known is None.

    "finished": the model ended its answer. "stopped": a stop string or stop token did. "length": the token limit was
    reached. "cancelled": the client left, the deadline passed, or a DELETE of the request ended it. "refused": the
    request never ran. "failed": an error of the server. "lost": the server process died. `first_token_seconds` and
    `total_seconds` count from the arrival, `decode_seconds` from the first token to the last. `user` is the user that
    the client names. Token counts are sums over all choices; a prompt that several choices share counts once.
    Of `draft_tokens` drafts that the model verified, `accepted_draft_tokens` were right and are among the completion's.
    """

    request_id: str
    route: str
    outcome: Outcome
    reason: str | None = None
    status: int | None = None
    num_choices: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    decode_seconds: float | None = None
    total_seconds: float | None = None
    user: str | None = None
    draft_tokens: int | None = None
    accepted_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"the outcome is {self.outcome!r}; choose one of {', '.join(get_args(Outcome))}")

    def __str__(self) -> str:
        """The outcome as key=value pairs in the order of its fields, on one line."""
        return " ".join(f"{name}={_pair_value(value)}" for name, value in vars(self).items())

    def as_dict(self) -> dict[str, OutcomeValue]:
        """The fields in their order, with the client's text cut and times rounded."""
        return dict.fromkeys(vars(self)) | self.known()

    def known(self) -> dict[str, OutcomeValue]:
        """The same fields without those that are None."""
        return {name: _rounded(value) for name, value in vars(self).items() if value is not None}


OutcomeSink = Callable[[RequestOutcome], None]


class OutcomeLog:
    """Writes one line per outcome to the logger "glint.requests": key=value pairs, or JSON where the log is JSON.

    Text of the client cannot end the line or forge a pair: it is cut to 200 characters and escaped as JSON unless it
    is a plain word. A value that is not known is "-", or null in JSON.
    """

    def __init__(self) -> None:
        self._logger = logging.getLogger(LOGGER_NAME)

    def admit(self, request_id: str, route: str) -> None:
        """Note a request that is not refused at once; its outcome follows."""

    def write(self, outcome: RequestOutcome) -> None:
        """Write the line, as an error where the request failed."""
        self._logger.log(logging.ERROR if outcome.outcome in FAILURES else logging.INFO, outcome)

    def write_soon(self, outcome: RequestOutcome) -> None:
        """Write the line of a request that was refused before it was read; many may come at once."""
        self.write(outcome)


def _pair_value(value: OutcomeValue) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        cut = value[:MAX_TEXT_CHARS]
        return cut if _PLAIN.fullmatch(cut) else escape(cut)
    return f"{value:.6f}" if isinstance(value, float) else str(value)


def _rounded(value: OutcomeValue) -> OutcomeValue:
    if isinstance(value, str):
        return value[:MAX_TEXT_CHARS]
    return round(value, 6) if isinstance(value, float) else value


def escape(value: object) -> str:
    """JSON on one printable line."""
    return json.dumps(value).replace("\x7f", "\\u007f")


class RequestRecord:
    """The record of a request from its arrival to its end. The sinks get its outcome exactly once.

    A record that is dropped, or open when the process ends, counts as failed with the reason "lost".
    """

    def __init__(self, request_id: str, route: str, *sinks: OutcomeSink) -> None:
        self.request_id = request_id
        self.route = route
        self.arrived_at = time.monotonic()
        self._sinks = sinks
        self._finalizer = weakref.finalize(self, _lose, request_id, route, self.arrived_at, sinks)

    @property
    def is_open(self) -> bool:
        """Whether the outcome is not recorded yet."""
        return self._finalizer.alive

    @property
    def seconds(self) -> float:
        """Seconds since the arrival."""
        return time.monotonic() - self.arrived_at

    def close(self, outcome: RequestOutcome) -> bool:
        """Pass the outcome to the sinks. A second call does nothing and returns False."""
        if self._finalizer.detach() is None:
            return False
        for sink in self._sinks:
            sink(outcome)
        return True


def _lose(request_id: str, route: str, arrived_at: float, sinks: tuple[OutcomeSink, ...]) -> None:
    seconds = time.monotonic() - arrived_at
    for sink in sinks:
        sink(RequestOutcome(request_id, route, "failed", reason="lost", total_seconds=seconds))
