"""The page pool and its prefix cache against a model made of dictionaries and lists."""

import random
from collections.abc import Callable
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.cpu.testing_library import declare

pytestmark = pytest.mark.sanitize

FULL_MASK = 2**64 - 1


class MisuseError(Exception):
    """A call that the pool refused as misuse."""


class Pool:
    """The native page pool."""

    def __init__(self, num_pages: int, page_tokens: int = 2, hash_mask: int = FULL_MASK) -> None:
        new = declare("glint_testing_pages_new", c_void_p, c_int32, c_int32, c_uint64)
        self._error = declare("glint_testing_pages_error", c_char_p)
        self._pool = new(num_pages, page_tokens, hash_mask)
        if self._pool is None:
            raise MisuseError(self._error().decode())
        pages, tokens, serial = POINTER(c_int32), POINTER(c_int32), POINTER(c_uint64)
        self._take = self._function("take", c_int32, pages, c_int32)
        self._hold = self._function("hold", c_int32, c_int32)
        self._release = self._function("release", c_int32, c_int32, c_int32)
        self._references = self._function("references", c_int32, c_int32)
        self._counts = self._function("counts", None, POINTER(c_int64))
        self._root = self._function("root", c_int32, c_uint64, serial)
        self._find = self._function("find", c_int32, c_uint64, tokens, c_int32, pages, serial)
        self._add = self._function("add", c_int32, c_uint64, tokens, c_int32, c_int32, serial)
        self._check = self._function("check", c_int32)
        self._damage = self._function("damage", c_int32, c_char_p, c_int32)
        self._free = self._function("free", None)

    def __del__(self) -> None:
        if getattr(self, "_free", None) is not None:
            self._free()

    def _function(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = declare(f"glint_testing_pages_{name}", result, c_void_p, *arguments)
        return lambda *values: function(self._pool, *values)

    def _refuse_misuse(self, status: int) -> int:
        if status == -1:
            raise MisuseError(self._error().decode())
        return status

    def take(self, count: int) -> list[int] | None:
        """Take `count` pages, or nothing."""
        out = (c_int32 * max(count, 1))(*[-7] * max(count, 1))
        if self._refuse_misuse(self._take(out, count)) == 0:
            assert list(out) == [-7] * max(count, 1)
            return None
        return list(out)[:count]

    def hold(self, page: int) -> None:
        """Add a reference."""
        self._refuse_misuse(self._hold(page))

    def release(self, page: int, is_reusable: bool = True) -> None:
        """Drop a reference."""
        self._refuse_misuse(self._release(page, is_reusable))

    def references(self, page: int) -> int:
        """Count the references of a page."""
        return self._refuse_misuse(self._references(page))

    def counts(self) -> tuple[int, int, int]:
        """Return free, held and cached."""
        out = (c_int64 * 4)()
        self._counts(out)
        assert out[3] == out[0] + out[2]
        return out[0], out[1], out[2]

    def root(self, salt: int) -> int:
        """Return the parent of a first page."""
        root = c_uint64()
        self._refuse_misuse(self._root(salt, byref(root)))
        return root.value

    def find(self, parent: int, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """Return page and serial of a registered page."""
        page, serial = c_int32(), c_uint64()
        array = (c_int32 * max(len(tokens), 1))(*tokens)
        found = self._refuse_misuse(self._find(parent, array, len(tokens), byref(page), byref(serial)))
        return (page.value, serial.value) if found else None

    def add(self, parent: int, tokens: tuple[int, ...], page: int) -> int:
        """Register a page and return the serial of its prefix."""
        serial = c_uint64()
        self._refuse_misuse(self._add(parent, (c_int32 * len(tokens))(*tokens), len(tokens), page, byref(serial)))
        return serial.value

    def problem(self) -> str:
        """Return what the integrity check finds, empty when all is well."""
        return "" if self._check() else self._error().decode()

    def damage(self, what: str, page: int) -> None:
        """Damage the pool on purpose."""
        self._refuse_misuse(self._damage(what.encode(), page))


@dataclass
class Model:
    """What the pool should hold: plain sets, dictionaries and lists in the order of eviction, `dead` before `cached`.

    `reusable` has the held pages that one of their holders released as reusable.
    """

    free: set[int]
    held: dict[int, int] = field(default_factory=dict)
    reusable: set[int] = field(default_factory=set)
    dead: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    keys: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = field(default_factory=dict)

    def key_of(self, page: int) -> tuple[int, tuple[int, ...]] | None:
        """Return the prefix that a page is registered under."""
        return next((key for key, (owner, _) in self.keys.items() if owner == page), None)

    def take(self, count: int, taken: list[int] | None) -> None:
        """Follow a take: free pages first, then dead ones, then the least recently used."""
        if count > len(self.free) + len(self.dead) + len(self.cached):
            assert taken is None
            return
        assert taken is not None and len(set(taken)) == count
        from_free = min(count, len(self.free))
        assert set(taken[:from_free]) <= self.free
        assert taken[from_free:] == (self.dead + self.cached)[: count - from_free]
        for page in taken[from_free:]:
            del self.keys[self.key_of(page)]
            (self.dead or self.cached).remove(page)
        self.free -= set(taken)
        self.held.update(dict.fromkeys(taken, 1))

    def hold(self, page: int) -> None:
        """Follow a hold."""
        for found in (self.dead, self.cached):
            if page in found:
                found.remove(page)
        self.held[page] = self.held.get(page, 0) + 1

    def release(self, page: int, is_reusable: bool) -> None:
        """Follow a release: what nobody expects to use again is evicted first."""
        self.held[page] -= 1
        if is_reusable:
            self.reusable.add(page)
        if self.held[page] == 0:
            del self.held[page]
            if self.key_of(page) is None:
                self.free.add(page)
            else:
                (self.cached if page in self.reusable else self.dead).append(page)
            self.reusable.discard(page)

    def counts(self) -> tuple[int, int, int]:
        """Return free, held and cached, which counts dead pages too."""
        return len(self.free), len(self.held), len(self.dead) + len(self.cached)


def refused(call: Callable[..., Any], *arguments: Any) -> str:
    """Return the text with which the pool refuses a call."""
    with pytest.raises(MisuseError) as caught:
        call(*arguments)
    return str(caught.value)


class Walk:
    """Random operations on the pool and the model together."""

    def __init__(self, seed: int, num_pages: int, hash_mask: int) -> None:
        self.random = random.Random(seed)
        self.pool = Pool(num_pages, 2, hash_mask)
        self.model = Model(set(range(num_pages)))
        self.parents = [self.pool.root(salt) for salt in range(3)]

    def take(self) -> None:
        """Take up to a few pages, sometimes more than there are."""
        free, _, cached = self.model.counts()
        count = self.random.choice([0, 1, 1, 2, 3, 5, 8, free + cached + 1])
        self.model.take(count, self.pool.take(count))

    def hold(self) -> None:
        """Hold a held, cached or free page."""
        page = self.random.randrange(self.pool_size())
        if page in self.model.free:
            assert "free" in refused(self.pool.hold, page)
        else:
            self.pool.hold(page)
            self.model.hold(page)

    def release(self) -> None:
        """Release a page, held or not."""
        page = self.random.choice([self.random.randrange(self.pool_size()), *self.model.held])
        if page in self.model.held:
            is_reusable = self.random.random() < 0.6
            self.pool.release(page, is_reusable)
            self.model.release(page, is_reusable)
        else:
            assert "not held" in refused(self.pool.release, page)

    def add(self) -> None:
        """Register a page under a new, taken or foreign prefix."""
        page = self.random.randrange(self.pool_size())
        key = self.random_key()
        own, known = self.model.key_of(page), self.model.keys.get(key)
        if page not in self.model.held:
            assert "not held" in refused(self.pool.add, *key, page)
        elif known is not None:
            assert self.pool.add(*key, page) == known[1]
        elif own is not None:
            assert "another prefix" in refused(self.pool.add, *key, page)
        else:
            serial = self.pool.add(*key, page)
            assert serial not in self.parents
            self.model.keys[key] = (page, serial)
            self.parents = [*self.parents[:3], *self.parents[3:][-12:], serial]

    def find(self) -> None:
        """Look a prefix up."""
        key = self.random_key()
        assert self.pool.find(*key) == self.model.keys.get(key)

    def random_key(self) -> tuple[int, tuple[int, ...]]:
        """Return a prefix from a small set, so that equal ones come up."""
        return self.random.choice(self.parents), (self.random.randrange(3), self.random.randrange(3))

    def pool_size(self) -> int:
        """Return the number of pages."""
        return sum(self.model.counts())

    def step(self) -> None:
        """Do one operation and compare everything."""
        self.random.choice([self.take, self.hold, self.release, self.release, self.add, self.add, self.find])()
        assert self.pool.counts() == self.model.counts()
        assert self.pool.problem() == ""


@pytest.mark.parametrize(("hash_mask", "steps"), [(FULL_MASK, 20_000), (3, 10_000), (0, 10_000)])
def test_random_operations_follow_the_model(hash_mask: int, steps: int) -> None:
    """Thousands of random operations: the pool equals the model after each, also when all hashes collide."""
    walk = Walk(hash_mask & 7, 24, hash_mask)
    for index in range(steps):
        walk.step()
        if index % 100 == 0:
            for page in range(24):
                assert walk.pool.references(page) == walk.model.held.get(page, 0)
            for key, known in walk.model.keys.items():
                assert walk.pool.find(*key) == known


@pytest.mark.parametrize("num_pages", [0, 1, 5])
def test_full_pool_refuses_one_more(num_pages: int) -> None:
    """Exactly all pages can be taken; one more is refused and changes nothing."""
    pool = Pool(num_pages)
    assert pool.take(num_pages + 1) is None
    assert pool.counts() == (num_pages, 0, 0)
    pages = pool.take(num_pages)
    assert pages is not None and sorted(pages) == list(range(num_pages))
    assert pool.take(1) is None
    assert pool.take(0) == []
    assert pool.counts() == (0, num_pages, 0)
    for page in pages:
        pool.release(page)
    assert pool.counts() == (num_pages, 0, 0)
    assert pool.problem() == ""


def cached_chain(pool: Pool, salt: int, count: int) -> list[int]:
    """Register a chain of pages and release them last page first."""
    pages = pool.take(count)
    assert pages is not None
    parent = pool.root(salt)
    for index, page in enumerate(pages):
        parent = pool.add(parent, (index, salt), page)
    for page in reversed(pages):
        pool.release(page)
    return pages


def test_least_recently_used_goes_first_leaves_before_roots() -> None:
    """Free pages are taken before cached ones, and cached ones in the order of their release."""
    pool = Pool(7)
    first, second = cached_chain(pool, 1, 3), cached_chain(pool, 2, 3)
    assert pool.counts() == (1, 0, 6)
    pool.hold(first[2])
    pool.release(first[2])
    taken = pool.take(4)
    assert taken is not None and taken[0] not in first + second
    assert taken[1:] == [first[1], first[0], second[2]]
    assert pool.find(pool.root(1), (0, 1)) is None
    match = pool.find(pool.root(2), (0, 2))
    assert match is not None and match[0] == second[0]
    child = pool.find(match[1], (1, 2))
    assert child is not None and child[0] == second[1]
    assert pool.find(child[1], (2, 2)) is None
    assert pool.problem() == ""


def test_pages_that_nobody_reuses_go_first_ends_before_beginnings() -> None:
    """Pages released as not reusable are found like any other, and evicted before everything that is reusable."""
    pool = Pool(6)
    old = cached_chain(pool, 1, 2)
    pages = pool.take(4)
    assert pages is not None
    parent = pool.root(2)
    serials = [parent := pool.add(parent, (index, 2), page) for index, page in enumerate(pages)]
    for page in reversed(pages):
        pool.release(page, is_reusable=page == pages[0])
    assert pool.counts() == (0, 0, 6)
    assert [pool.find(serial, (index + 1, 2)) for index, serial in enumerate(serials[:3])] == [
        *zip(pages[1:], serials[1:], strict=True)
    ]
    assert pool.take(5) == [*reversed(pages[1:]), *reversed(old)]
    assert pool.find(pool.root(2), (0, 2)) == (pages[0], serials[0])
    assert pool.problem() == ""


@pytest.mark.parametrize(("first", "second"), [(False, True), (True, False)])
def test_page_of_two_holders_is_reusable_if_one_of_them_says_so(first: bool, second: bool) -> None:
    """The last to release a page does not decide alone."""
    pool = Pool(2)
    old = cached_chain(pool, 1, 1)
    (page,) = cached_chain(pool, 2, 1)
    pool.hold(page)
    pool.hold(page)
    pool.release(page, first)
    assert pool.counts() == (0, 1, 1)
    pool.release(page, second)
    assert pool.take(2) == [*old, page]


def test_page_that_was_found_again_is_judged_anew() -> None:
    """A page at the head of the eviction goes to its end once it was used again, and back."""
    pool = Pool(2)
    old, page = cached_chain(pool, 1, 1)[0], cached_chain(pool, 2, 1)[0]
    for is_reusable in (False, True, False):
        pool.hold(page)
        pool.release(page, is_reusable)
    assert pool.take(1) == [page]
    pool.add(pool.root(2), (0, 2), page)
    pool.release(page, is_reusable=False)
    pool.hold(page)
    pool.release(page)
    assert pool.take(1) == [old]


def test_refused_take_evicts_nothing() -> None:
    """A take that cannot be met leaves every cached prefix where it is."""
    pool = Pool(4)
    pages = cached_chain(pool, 1, 3)
    assert pool.take(5) is None
    assert pool.counts() == (1, 0, 3)
    match = pool.find(pool.root(1), (0, 1))
    assert match is not None and match[0] == pages[0]


def test_child_of_an_evicted_page_is_never_found_again() -> None:
    """A prefix made anew gets a new serial, so the old children stay unreachable."""
    pool = Pool(2)
    parent_page, child_page = pool.take(2)
    parent = pool.add(pool.root(0), (5, 6), parent_page)
    pool.add(parent, (7, 8), child_page)
    pool.release(parent_page)
    assert pool.take(1) == [parent_page]
    anew = pool.add(pool.root(0), (5, 6), parent_page)
    assert anew != parent
    assert pool.find(anew, (7, 8)) is None
    assert pool.problem() == ""


@pytest.mark.parametrize("hash_mask", [FULL_MASK, 0])
def test_salts_and_parents_separate(hash_mask: int) -> None:
    """Equal tokens under other salts or parents are other prefixes, whatever their hashes are."""
    pool = Pool(4, 2, hash_mask)
    pages = pool.take(4)
    serial = pool.add(pool.root(0), (1, 2), pages[0])
    other = pool.add(pool.root(1), (1, 2), pages[1])
    deeper = pool.add(serial, (1, 2), pages[2])
    assert len({serial, other, deeper}) == 3
    assert pool.find(pool.root(2), (1, 2)) is None
    assert pool.find(other, (1, 2)) is None
    assert pool.find(serial, (1, 2)) == (pages[2], deeper)
    assert pool.add(pool.root(0), (1, 2), pages[3]) == serial
    pool.release(pages[3])
    assert pool.counts() == (1, 3, 0)
    assert pool.problem() == ""


def test_roots_are_no_serials() -> None:
    """Roots are distinct for all salts and far from every serial."""
    pool = Pool(1)
    roots = {pool.root(salt) for salt in [*range(1000), 2**63 - 1]}
    assert len(roots) == 1001 and min(roots) >= 2**63
    assert "below 2^63" in refused(pool.root, 2**63)


def test_misuse_is_refused_and_changes_nothing() -> None:
    """Wrong indices, wrong states and wrong sizes are refused with the thing and the value."""
    pool = Pool(3)
    page = pool.take(1)[0]
    free = (page + 1) % 3
    for wrong in (-1, 3, 2**31 - 1, -(2**31)):
        for call in (pool.hold, pool.release, pool.references):
            assert f"page {wrong} does not exist" in refused(call, wrong)
    assert "is free" in refused(pool.hold, free)
    assert "not held" in refused(pool.release, free)
    assert "not held" in refused(pool.add, pool.root(0), (1, 2), free)
    assert "has 3 tokens; it must have 2" in refused(pool.add, pool.root(0), (1, 2, 3), page)
    assert "has 0 tokens" in refused(pool.find, pool.root(0), ())
    assert "never given out" in refused(pool.find, 0, (1, 2))
    assert "never given out" in refused(pool.add, 99, (1, 2), page)
    assert "num_pages is -1" in refused(Pool, -1)
    assert "page_tokens is 0" in refused(Pool, 1, 0)
    assert pool.counts() == (2, 1, 0)
    assert pool.problem() == ""


@pytest.mark.parametrize(
    ("what", "which", "text"),
    [
        ("references", "held", "references"),
        ("references", "cached", "references"),
        ("state", "free", "free list"),
        ("state", "cached", "cached list"),
        ("state", "dead", "dead list"),
        ("link", "dead", "dead list"),
        ("link", "free", "free list"),
        ("free count", "free", "free list"),
        ("hash", "cached", "hash"),
        ("serial", "free", "registration"),
        ("serial", "cached", "two pages have the serial"),
        ("chain", "cached", "hash chains"),
        ("held count", "held", "do not make"),
    ],
)
def test_check_finds_damage(what: str, which: str, text: str) -> None:
    """The integrity check names every kind of damage done to a sound pool."""
    pool = Pool(8)
    cached = cached_chain(pool, 1, 3)
    pages = {"cached": cached[0], "held": pool.take(1)[0], "dead": cached_chain(pool, 2, 1)[0]}
    pool.hold(pages["dead"])
    pool.release(pages["dead"], is_reusable=False)
    pages["free"] = next(page for page in range(8) if page not in {*cached, *pages.values()})
    assert pool.problem() == ""
    pool.damage(what, pages[which])
    assert text in pool.problem()
