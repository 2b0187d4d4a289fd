"""The plan of a step, as the scheduler gives it to the engine."""

from dataclasses import dataclass
from typing import NamedTuple


class StepItem(NamedTuple):
    """One request's part of a step: it advances by at most `advance_tokens` known tokens."""

    request_id: int
    advance_tokens: int


@dataclass(frozen=True)
class StepPlan:
    """The work of one step: decodes first, then prompt chunks, then requests scheduled for the first time.

    No request occurs twice. The first `num_decodes` items are decodes, whose advance beyond one token is that of drafts
    which they verify at most. The last `num_first` items are those of requests that hold no pages yet, whose prefix is
    looked up when the step is submitted. A plan without items means that there is nothing to do now. Steps are
    numbered by `serial`; a plan that was not submitted leaves its number to the next. Without `may_draft` the step
    makes no drafts, for want of pages.
    """

    serial: int
    items: tuple[StepItem, ...]
    num_first: int
    may_draft: bool = True
    num_decodes: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, at most the token budget."""
        return sum(item.advance_tokens for item in self.items)

    @property
    def first_items(self) -> tuple[StepItem, ...]:
        """The items of requests scheduled for the first time, or again after they were preempted."""
        return self.items[len(self.items) - self.num_first :]
