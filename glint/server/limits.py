"""The limits of what a client may ask for."""

import math
from dataclasses import dataclass, fields

from glint.errors import RequestError
from glint.sampling import MAX_CHOICES


@dataclass(frozen=True)
class Limits:
    """The limits of one server. The defaults suit agents with long histories and many tools.

    A body has at most `body_bytes` bytes and `body_containers` objects and lists, nests at most `body_depth` deep and
    must arrive within `body_seconds`. The HTTP server limits headers to 64 KiB. A conversation has at most `messages`
    messages of at most `content_parts` parts each. At most `tools` tools are declared, the schema of each at most
    `schema_bytes` long as compact JSON and `schema_depth` deep; these two hold for response formats as well. Stop
    strings: at most `stops`, each of at most `stop_chars` characters; as many stop token ids. A request has at most
    `prompts` prompts and `choices` answers to each, `logit_bias_entries` entries of logit_bias, and `logprob_entries`
    entries of prompt log-probabilities. It ends after `deadline_seconds`; a client may ask for another deadline up to
    `max_deadline_seconds`. At most `waiting_requests` requests with `waiting_tokens` prompt
    tokens together wait for their first step.
    """

    body_bytes: int = 4 * 2**20
    body_depth: int = 64
    body_containers: int = 100_000
    body_seconds: float = 30.0
    messages: int = 4096
    content_parts: int = 1024
    tools: int = 128
    schema_bytes: int = 256 * 1024
    schema_depth: int = 32
    stops: int = 16
    stop_chars: int = 256
    logit_bias_entries: int = 1024
    choices: int = 16
    logprob_entries: int = 500_000
    prompts: int = 64
    deadline_seconds: float = 600.0
    max_deadline_seconds: float = 3600.0
    waiting_requests: int = 256
    waiting_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, int if field.type is int else int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value) or value <= 0:
                raise RequestError(f"the limit {field.name} is {value!r}; give a number above zero")
        if self.choices > MAX_CHOICES:
            raise RequestError(f"the limit choices (--max-choices) is {self.choices}; give at most {MAX_CHOICES}")
        if self.deadline_seconds > self.max_deadline_seconds:
            raise RequestError(
                f"the limit deadline_seconds is {self.deadline_seconds}, above max_deadline_seconds "
                f"{self.max_deadline_seconds}; lower the first or raise the second"
            )
