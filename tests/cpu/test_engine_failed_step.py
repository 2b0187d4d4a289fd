"""A step that fails while the next one is already submitted: nothing of it may be shared afterwards."""

import ctypes
import time
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

import pytest

from glint.native import abi
from glint.native.library import InternalFailure
from tests.cpu.random_asks import random_prompt
from tests.cpu.small_engine import SMALL_SHAPE, Session, answer_all, answer_alone, make_ask
from tests.cpu.test_engine_deferred import deferring
from tests.cpu.testing_library import declare

CHUNK = 16
WAIT_SECONDS = 10.0


def test_pages_of_a_failed_step_are_never_shared() -> None:
    """The first step fails in its forward pass; the next holds the following chunk of the same prompt and succeeds."""
    ask = make_ask(random_prompt(20, 60), 4)
    count = declare("glint_testing_tap_count", c_int64, c_void_p, c_int64)
    replace = declare("glint_testing_tap_replace", c_int32, c_void_p, c_int64, POINTER(c_float), c_int64)
    with deferring() as engine:
        tap = declare("glint_testing_tap_new", c_void_p, POINTER(abi.Engine))(engine._engine)
        assert replace(tap, 1, (ctypes.c_float * SMALL_SHAPE["hidden_size"])(), 1) == abi.STATUS_OK
        session = Session(engine)
        request_id = session.add(ask)
        session.submit([(request_id, CHUNK)])
        deadline = time.monotonic() + WAIT_SECONDS
        while count(tap, 1) < CHUNK and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
        assert declare("glint_testing_tap_remove", c_int32, POINTER(abi.Engine))(engine._engine) == abi.STATUS_OK
        session.submit([(request_id, CHUNK)])
        with pytest.raises(InternalFailure, match="rows to put in"):
            session.collect()
        session.collect()
        session.free(request_id)
        declare("glint_testing_tap_free", None, c_void_p)(tap)
        assert engine.stats().pages_cached == 0
        assert answer_all(engine, [ask]) == [answer_alone(ask)]
        engine.check()
