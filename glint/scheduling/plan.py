"""What crosses the border between the scheduler and the engine, as plain data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepItem:
    """One request's part of a step: it advances by at most `advance_tokens` known tokens."""

    request_id: int
    advance_tokens: int


@dataclass(frozen=True)
class StepPlan:
    """What one step computes: decodes first, then prompt chunks, then requests scheduled for the first time.

    No request occurs twice. A plan without items means that there is nothing to do.
    """

    items: tuple[StepItem, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, at most the token budget."""
        return sum(item.advance_tokens for item in self.items)


@dataclass(frozen=True)
class Progress:
    """What a step did for one request: tokens computed in all, and tokens sampled in this step."""

    request_id: int
    computed_tokens: int
    new_tokens: int
