"""A request as the scheduler counts it."""

from dataclasses import dataclass

from glint.engine.share import Share


@dataclass(slots=True, eq=False)
class ScheduledRequest:
    """A request's counts: tokens of its prompt, tokens known so far, tokens computed so far.

    Steps in flight are counted as if they were done: the tokens they compute as computed, the tokens they sample as
    known. So `computed_tokens < known_tokens <= max_known_tokens` holds while there is something to plan. A step that
    verifies drafts counts as one token until it is collected. `arrival` numbers the requests in the order in which they
    came. `leader_id` names the request whose prompt this one shares, `prompt_step` the step that computes the last
    prompt token. A step makes or verifies at most `max_drafts` drafts.
    """

    request_id: int
    arrival: int
    share: Share
    prompt_tokens: int
    max_known_tokens: int
    leader_id: int | None
    known_tokens: int
    computed_tokens: int = 0
    max_drafts: int = 0
    prompt_step: int | None = None

    @property
    def paged_tokens(self) -> int:
        """Tokens that the next step may take pages for.

        These are the known ones, and drafts that it makes, that it verifies and that the step in flight verifies.
        """
        return min(self.known_tokens + 3 * self.max_drafts, self.max_known_tokens)

    def next_chunk(self, chunk_tokens: int) -> int:
        """Tokens up to the next multiple of `chunk_tokens` positions, or up to the last known token."""
        end = (self.computed_tokens // chunk_tokens + 1) * chunk_tokens
        return min(end, self.known_tokens) - self.computed_tokens

    def forget_pages(self) -> None:
        """Start again from the first token; what was sampled stays known."""
        self.computed_tokens = 0
        self.prompt_step = None
