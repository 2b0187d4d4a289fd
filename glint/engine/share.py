"""The owner of a request, for fair scheduling."""

from dataclasses import dataclass

from glint.errors import RequestError

MAX_WEIGHT = 100
MAX_PRIORITY = 1000


@dataclass(frozen=True)
class Share:
    """Requests of one `key` share what the key gets; a key of weight 3 gets three times what one of weight 1 gets.

    Within its key a request of lower `priority` goes first, and the shorter prompt first where priorities are equal.
    """

    key: str | int = ""
    weight: int = 1
    priority: int = 0

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("weight", self.weight, 1, MAX_WEIGHT),
            ("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise RequestError(f"{name} is {value!r}; give a whole number from {least} to {most}", name)


DEFAULT_SHARE = Share()
