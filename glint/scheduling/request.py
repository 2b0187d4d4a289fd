"""What the scheduler knows of a request."""

from dataclasses import dataclass


@dataclass
class Request:
    """A request's counts: tokens of its prompt, tokens known so far, tokens computed so far.

    `prompt_tokens <= known_tokens` and `computed_tokens < known_tokens` hold while the request is scheduled: the last
    known token is always still to be computed. `leader_id` names the request whose prompt this one shares.
    """

    request_id: int
    prompt_tokens: int
    known_tokens: int
    leader_id: int | None
    computed_tokens: int = 0

    @property
    def remaining_tokens(self) -> int:
        """Tokens that are known and not yet computed."""
        return self.known_tokens - self.computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token is left to compute."""
        return self.remaining_tokens == 1

    @property
    def has_computed_prompt(self) -> bool:
        """Whether the pages of the whole prompt are filled."""
        return self.computed_tokens >= self.prompt_tokens
