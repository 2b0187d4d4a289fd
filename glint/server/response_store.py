"""The responses of POST /v1/responses that the server keeps: in memory, bounded, each for the key that asked for it."""

from dataclasses import dataclass
from typing import NamedTuple

from glint.server.auth import Tenant

STORE_FLAG = "--responses-store-size"
MAX_BYTES = 256 * 2**20
ITEM_BYTES = 200
OFF = f"this server stores no responses; start it with {STORE_FLAG} N"


class StoredItem(NamedTuple):
    """An item of a conversation as JSON, and its id."""

    id: str
    body: bytes


@dataclass(frozen=True)
class StoredResponse:
    """A response as JSON, with every item that the model read before it and the items of its output.

    Of `context`, the last `num_new` items came with the request itself and the others with earlier ones.
    """

    id: str
    body: bytes
    context: tuple[StoredItem, ...]
    num_new: int
    output: tuple[StoredItem, ...]

    @property
    def num_bytes(self) -> int:
        """An upper bound of its memory: it counts items that several responses share with each of them."""
        return len(self.body) + sum(len(item.body) + ITEM_BYTES for item in (*self.context, *self.output))

    @property
    def own_items(self) -> tuple[StoredItem, ...]:
        """The items that no earlier response has."""
        return (*self.context[len(self.context) - self.num_new :], *self.output)


class _KeyResponses:
    """The responses of one key, oldest first, and their items by the ids of item and response."""

    def __init__(self) -> None:
        self.responses: dict[str, StoredResponse] = {}
        self.items: dict[str, dict[str, bytes]] = {}
        self.num_bytes = 0

    def add(self, response: StoredResponse) -> None:
        """Add a response."""
        self.responses[response.id] = response
        for item in response.own_items:
            self.items.setdefault(item.id, {})[response.id] = item.body
        self.num_bytes += response.num_bytes

    def remove(self, response_id: str) -> None:
        """Remove a response and the items that came with no other."""
        response = self.responses.pop(response_id)
        for item in response.own_items:
            self.items.get(item.id, {}).pop(response_id, None)
            if not self.items.get(item.id):
                self.items.pop(item.id, None)
        self.num_bytes -= response.num_bytes


class ResponseStore:
    """At most `max_responses` responses of all keys, in at most `max_bytes`. For one thread.

    A key finds its own responses alone; the clients of a server without keys share one store. A store that is full
    drops the oldest response of the key that has the most, so that one key cannot push out those of another that has
    less. With `max_responses` 0 the store is off.
    """

    def __init__(self, max_responses: int, max_bytes: int = MAX_BYTES) -> None:
        self.max_responses = max_responses
        self._max_bytes = max_bytes
        self._keys: dict[int, _KeyResponses] = {}

    @property
    def is_on(self) -> bool:
        """Whether responses are stored."""
        return self.max_responses > 0

    def add(self, tenant: Tenant, response: StoredResponse) -> None:
        """Store a response, and drop others where the store is full."""
        self._keys.setdefault(tenant.cache_salt, _KeyResponses()).add(response)
        while sum(len(key.responses) for key in self._keys.values()) > self.max_responses:
            self._drop_oldest(max(self._keys, key=lambda salt: len(self._keys[salt].responses)))
        while sum(key.num_bytes for key in self._keys.values()) > self._max_bytes:
            self._drop_oldest(max(self._keys, key=lambda salt: self._keys[salt].num_bytes))

    def find(self, tenant: Tenant, response_id: str) -> StoredResponse | None:
        """A response of the tenant."""
        return self._of(tenant).responses.get(response_id)

    def find_item(self, tenant: Tenant, item_id: str) -> bytes | None:
        """An item of the tenant's responses, of their input or output."""
        return next(reversed(self._of(tenant).items.get(item_id, {}).values()), None)

    def remove(self, tenant: Tenant, response_id: str) -> bool:
        """Remove a response; whether it was there."""
        if self.find(tenant, response_id) is None:
            return False
        self._remove(tenant.cache_salt, response_id)
        return True

    def explain_missing(self, what: str) -> str:
        """Why something is not in the store."""
        if not self.is_on:
            return f"{what} cannot be found: {OFF}"
        return (
            f"{what} is not stored for this key: it was sent with store false, was deleted, made room for newer ones "
            f"({STORE_FLAG} {self.max_responses}), or is in the memory of another server process or of one that ended"
        )

    def _of(self, tenant: Tenant) -> _KeyResponses:
        return self._keys.get(tenant.cache_salt, _KeyResponses())

    def _drop_oldest(self, salt: int) -> None:
        self._remove(salt, next(iter(self._keys[salt].responses)))

    def _remove(self, salt: int, response_id: str) -> None:
        self._keys[salt].remove(response_id)
        if not self._keys[salt].responses:
            del self._keys[salt]
