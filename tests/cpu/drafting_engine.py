"""An engine with an MTP layer whose draft logits a test reads."""

from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np

from glint.checkpoint.config import ModelConfig
from glint.engine.args import Device
from glint.native import abi
from glint.native.library import NativeEngine
from tests.cpu.small_engine import Session, int_array, make_ask
from tests.cpu.testing_library import declare
from tests.reference.numpy_ops import FloatArray


class DraftingEngine:
    """An engine with its MTP layer whose draft logits a test reads."""

    def __init__(self, engine: NativeEngine, config: ModelConfig, page_tokens: int, device: Device = "cpu") -> None:
        self.engine = engine
        self.config = config
        self.page_tokens = page_tokens
        self.device = device

    def declare(self, name: str, result: Any, *arguments: Any) -> Any:
        """A function of the test library of the engine's device."""
        return declare(f"glint_testing_{name}", result, *arguments, device=self.device)

    def check(self, status: int) -> None:
        """Fail with the library's words where a call did not work."""
        assert status == abi.STATUS_OK, self.declare("taps_error", c_char_p)().decode()

    def run_prompt(self, tokens: list[int]) -> FloatArray:
        """Compute all tokens in one step and give what comes out of the last layer, [len, hidden]."""
        tap = self.declare("tap_new", c_void_p, POINTER(abi.Engine))(self.engine._engine)
        session = Session(self.engine)
        session.submit([(session.add(make_ask(tokens, 1)), len(tokens))])
        session.collect()
        rows = np.full((len(tokens), self.config.hidden_size), np.nan, np.float32)
        self.declare("tap_read", None, c_void_p, c_int64, POINTER(c_float))(
            tap, self.config.num_layers, rows.ctypes.data_as(POINTER(c_float))
        )
        self.check(self.declare("tap_remove", c_int32, POINTER(abi.Engine))(self.engine._engine))
        self.declare("tap_free", None, c_void_p)(tap)
        return rows

    def draft_logits(self, tokens: list[int], with_hidden: int, first_position: int = 1) -> FloatArray:
        """Logits behind tokens from a position on, the first of them from hidden states of the last step."""
        arguments = POINTER(c_float), POINTER(c_int32), c_int32, c_int32, c_int32, c_int32
        read = self.declare("draft_logits", c_int32, POINTER(abi.Engine), *arguments)
        out = np.full((len(tokens), self.config.vocab_size), np.nan, np.float32)
        numbers = len(tokens), with_hidden, self.page_tokens, first_position
        self.check(read(self.engine._engine, out.ctypes.data_as(POINTER(c_float)), int_array(tokens), *numbers))
        return out

    def poison_pages(self) -> None:
        """Fill the whole page cache with NaN."""
        self.check(self.declare("poison_pages", c_int32, POINTER(abi.Engine))(self.engine._engine))
