"""The requests of one key that have prompt tokens to compute, and the key's share of work so far."""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TypeVar

from glint.engine.scheduled_request import ScheduledRequest

AgeEntry = tuple[int, ScheduledRequest]
SizeEntry = tuple[int, int, int, ScheduledRequest]
Entry = TypeVar("Entry", AgeEntry, SizeEntry)


@dataclass(slots=True)
class KeyQueue:
    """The prompts of a key in two orders: by age, and by priority and size.

    `clock` counts the prompt tokens that were computed for the key, divided by its weight. `owes_oldest` says that
    the last step with prompt tokens of the key had none of its oldest prompt. `begun` and `waiting` are the prompts
    by priority, size and age: those of running requests and those that have no pages. `by_age` has both.
    """

    number: int
    weight: int
    clock: float
    owes_oldest: bool = False
    num_requests: int = 0
    num_running: int = 0
    by_age: list[AgeEntry] = field(default_factory=list)
    begun: list[SizeEntry] = field(default_factory=list)
    waiting: list[SizeEntry] = field(default_factory=list)

    @property
    def oldest(self) -> ScheduledRequest:
        """The oldest request with prompt tokens to compute; there must be one."""
        return self.by_age[0][1]

    def add(self, request: ScheduledRequest) -> None:
        """Take in a request that waits for its first step, or again after it was preempted."""
        insort(self.by_age, age_entry(request))
        insort(self.waiting, _size_entry(request))

    def begin(self, request: ScheduledRequest) -> None:
        """A waiting request runs; its prompt is still to be computed."""
        drop(self.waiting, _size_entry(request))
        insort(self.begun, _size_entry(request))

    def discard(self, request: ScheduledRequest, *, is_begun: bool) -> None:
        """Nothing of the prompt is left to compute, or the request has ended."""
        drop(self.by_age, age_entry(request))
        drop(self.begun if is_begun else self.waiting, _size_entry(request))


def age_entry(request: ScheduledRequest) -> AgeEntry:
    """Sorts by age; no two entries have the same arrival, so requests are never compared."""
    return request.arrival, request


def _size_entry(request: ScheduledRequest) -> SizeEntry:
    return request.share.priority, request.prompt_tokens, request.arrival, request


def drop(entries: list[Entry], entry: Entry) -> None:
    """Take an entry out of a sorted list."""
    del entries[bisect_left(entries, entry)]
