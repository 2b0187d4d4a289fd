"""Showing a load: one line with bytes and rate, a bar on a terminal alone, silence where it failed or was short."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from glint.engine import loading
from glint.engine.loading import describe_load, shown_loading
from glint.native import abi


class Load:
    """A load whose bytes come in when the test says so."""

    def __init__(self) -> None:
        self.state = abi.sized(abi.LoadState, is_loading=0, bytes_done=0, bytes_total=0)
        self.num_reads = 0

    def read(self) -> abi.LoadState:
        self.num_reads += 1
        return self.state

    def put(self, is_loading: int, done: int, total: int = 4_000_000_000) -> None:
        self.state = abi.sized(abi.LoadState, is_loading=is_loading, bytes_done=done, bytes_total=total)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "POLL_SECONDS", 0.005)
    monkeypatch.setattr(loading, "SHOWN_AFTER_SECONDS", 0.05)


@contextmanager
def shown(load: Load, is_always_said: bool = False) -> Iterator[list[str]]:
    said: list[str] = []
    with shown_loading(load.read, said.append, is_always_said):
        yield said


def test_a_line_says_bytes_time_and_rate() -> None:
    assert describe_load(44_100_000_000, 9.8) == "weights 44.1 GB in 9.8 s (4.5 GB/s)"


def test_the_time_ends_with_the_last_byte() -> None:
    load = Load()
    with shown(load) as said:
        load.put(1, 0)
        time.sleep(0.2)
        load.put(1, 4_000_000_000)
        time.sleep(1.2)
        load.put(0, 4_000_000_000)
    (line,) = said
    assert line.startswith("weights 4.0 GB in ") and 0.2 <= float(line.split()[4]) < 1.2


def test_a_short_load_is_said_only_where_asked_for() -> None:
    for is_always_said in (False, True):
        load = Load()
        with shown(load, is_always_said) as said:
            load.put(0, 4_000_000_000)
        assert len(said) == int(is_always_said)


def test_a_load_before_this_one_does_not_count() -> None:
    load = Load()
    load.put(0, 4_000_000_000)
    with shown(load) as said:
        time.sleep(0.05)
        load.put(1, 0)
        time.sleep(0.15)
        load.put(0, 4_000_000_000)
    assert float(said[0].split()[4]) >= 0.2


def test_a_failure_is_passed_on_without_a_line() -> None:
    load = Load()
    said: list[str] = []
    with pytest.raises(ValueError, match="bad"), shown_loading(load.read, said.append, True):
        load.put(1, 5)
        raise ValueError("bad")
    assert said == []
    reads = load.num_reads
    time.sleep(0.03)
    assert load.num_reads == reads


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "has_bar"), [(Terminal(), True), (io.StringIO(), False)])
def test_the_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, has_bar: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    load = Load()
    with shown(load) as said:
        load.put(1, 1_000_000_000)
        time.sleep(0.3)
        load.put(0, 4_000_000_000)
    assert len(said) == 1
    assert ("GB" in stream.getvalue()) == has_bar
