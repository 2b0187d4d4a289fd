"""Engines that round keys and values to E4M3 and keep them in pages of their own kind."""

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int32

from glint.engine.args import Device
from tests.cpu.testing_library import declare


@contextmanager
def rounded_pages(device: Device = "cpu") -> Iterator[None]:
    """Engines of the testing library that are made inside round what they keep."""
    switch = declare("glint_testing_round_pages", None, c_int32, device=device)
    switch(1)
    try:
        yield
    finally:
        switch(0)
