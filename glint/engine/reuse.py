"""What later requests can share of a request that has ended."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reuse:
    """Later requests can share the first `num_tokens` tokens of prompt and output; the pages behind are evicted first.

    They can share all of it where the output holds the token `unless_token`. Where the request ends before the model
    ends it, the same prompt may come again, so later requests can share the whole prompt at least.
    """

    num_tokens: int
    unless_token: int | None = None
