"""The native library: which file it is, loading it, and calling it with failures as exceptions."""

import ctypes
import importlib.util
import os
import struct
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from glint.errors import EngineError, InternalFailure, RankFailed
from glint.native import abi

LIBRARY_VARIABLE = "GLINT_ENGINE"
NCCL_VARIABLE = "GLINT_NCCL"
BUILD_COMMANDS = {"cpu": "scripts/build.sh", "cuda": "scripts/build.sh --cuda (it needs nvcc of the CUDA toolkit 13)"}
_TOKEN_BYTES = 4
_LOGPROB = struct.Struct("=iiif")
_STEP_ITEM = struct.Struct("=Qiiii")
_ITEM_RESULT = struct.Struct("=QiiiiiiiiQQ")


class InvalidArgument(EngineError):
    """The library refused an argument; nothing changed."""


class UnknownRequest(EngineError):
    """The library does not know the request id."""


class OutOfPages(EngineError):
    """The step needs `missing_pages` more pages than there are; nothing changed."""

    def __init__(self, message: str, missing_pages: int) -> None:
        super().__init__(message)
        self.missing_pages = missing_pages


class OutOfMemory(EngineError):
    """The machine has not enough memory for what was asked."""


class FileFailure(EngineError):
    """A checkpoint file could not be opened, mapped or read."""


class EngineBusy(EngineError):
    """The call must wait for another one to end."""


class Unsupported(EngineError):
    """The library or the machine cannot do what was asked."""


_EXCEPTIONS: dict[int, type[EngineError]] = {
    abi.STATUS_INVALID_ARGUMENT: InvalidArgument,
    abi.STATUS_UNKNOWN_REQUEST: UnknownRequest,
    abi.STATUS_OUT_OF_MEMORY: OutOfMemory,
    abi.STATUS_FILE: FileFailure,
    abi.STATUS_BUSY: EngineBusy,
    abi.STATUS_UNSUPPORTED: Unsupported,
    abi.STATUS_INTERNAL: InternalFailure,
    abi.STATUS_RANK_FAILED: RankFailed,
}


class ItemOutcome(NamedTuple):
    """The result of a step for one request.

    `logprobs` maps an absolute position of prompt and generated tokens to token ids and their log-probabilities: the
    actual token first, then the best in descending order. `drafts` are what the MTP layer expects to follow. The
    request computed from `first_position` up to `computed_tokens` and verified `num_verified` drafts.
    """

    request_id: int
    tokens: tuple[int, ...]
    finish_reason: int
    failure: int
    cached_tokens: int
    computed_tokens: int
    logprobs: dict[int, dict[int, float]]
    drafts: tuple[int, ...] = ()
    first_position: int = 0
    num_verified: int = 0


class StepOutcome(NamedTuple):
    """The results of a step, per item in the order of the submit, and the pages after it."""

    items: tuple[ItemOutcome, ...]
    pages_free: int
    pages_held: int
    pages_cached: int


def choose_library(device: str, path: str | Path | None = None) -> Path:
    """Find the library file of a device.

    An explicit path goes first, then $GLINT_ENGINE, then the installed package, then the build folder of the
    repository. A path that was asked for must exist; nothing else is tried in its place.
    """
    name = f"libglint_{device}.so"
    for asked, origin in ((path, "engine"), (os.environ.get(LIBRARY_VARIABLE), f"${LIBRARY_VARIABLE}")):
        if asked:
            chosen = Path(asked).expanduser()
            if not chosen.is_file():
                raise EngineError(f"{origin} is {chosen}, which is not a file; give the path of a {name}")
            return chosen
    package = Path(__file__).resolve().parents[1]
    places = (package / "lib" / name, package.parent / "build" / name)
    for place in places:
        if place.is_file():
            return place
    raise EngineError(
        f"no native library for device {device!r}: neither {places[0]} nor {places[1]} exists; build it with "
        f"{BUILD_COMMANDS.get(device, BUILD_COMMANDS['cpu'])}, or set ${LIBRARY_VARIABLE} to the path of a {name}"
    )


def name_nccl() -> None:
    """Let the native library find the NCCL of the wheel nvidia-nccl-cu13, unless $GLINT_NCCL already names a file."""
    with suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("nvidia.nccl")
        folders = [] if found is None else list(found.submodule_search_locations or ())
        for library in (Path(folder) / "lib" / "libnccl.so.2" for folder in folders):
            if library.is_file():
                os.environ.setdefault(NCCL_VARIABLE, str(library))


def load_library(path: Path) -> ctypes.CDLL:
    """Load a library, check that it speaks our ABI version, and give every function its types."""
    try:
        library = ctypes.CDLL(str(path.resolve()))
        for name, (result, arguments) in abi.FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as problem:
        raise EngineError(f"{path} cannot be used as a glint library: {problem}; build it anew") from problem
    version = library.glint_abi_version()
    if version != abi.ABI_VERSION:
        raise EngineError(
            f"{path} speaks ABI version {version}, this package needs {abi.ABI_VERSION}; build it anew with "
            "scripts/build.sh"
        )
    return library


def open_library(device: str, path: str | Path | None = None) -> ctypes.CDLL:
    """Find and load the library of a device; one that computes on another device is refused."""
    chosen = choose_library(device, path)
    if device == "cuda":
        name_nccl()
    library = load_library(chosen)
    backend = library.glint_backend_name().decode()
    if backend != device:
        raise EngineError(f"{chosen} computes on {backend!r}, but device is {device!r}; make them agree")
    return library


def _check(library: ctypes.CDLL, call: str, status: int) -> None:
    """Turn a status into the exception of its kind, with the library's own words."""
    if status != abi.STATUS_OK:
        text = (library.glint_last_error() or b"").decode("utf-8", "replace")
        raise _EXCEPTIONS.get(status, InternalFailure)(f"{call}: {text or f'status {status}'}")


def describe_device(library: ctypes.CDLL, index: int = 0, kernels: int = abi.KERNELS_AUTO) -> abi.Device:
    """What the library says of a device and of the kernels that it would run there; one it cannot use is refused."""
    device = abi.sized(abi.Device)
    _check(library, "glint_describe_device", library.glint_describe_device(index, kernels, ctypes.byref(device)))
    return device


def plan_engine(library: ctypes.CDLL, options: abi.EngineOptions) -> abi.EnginePlan:
    """The memory that an engine with these options would take, and its device. Makes nothing and opens no file."""
    plan = abi.sized(abi.EnginePlan)
    _check(library, "glint_plan_engine", library.glint_plan_engine(ctypes.byref(options), ctypes.byref(plan)))
    return plan


def load_progress(library: ctypes.CDLL) -> abi.LoadState:
    """How far the weights of the engine that is being made are read; may be called from any thread."""
    state = abi.sized(abi.LoadState)
    _check(library, "glint_load_progress", library.glint_load_progress(ctypes.byref(state)))
    return state


def _free_engine(library: ctypes.CDLL, engine: Any) -> None:
    library.glint_free_engine(engine)


class NativeEngine:
    """One engine of a loaded library. It ends with `close`, with its context, or with the last reference to it.

    One thread makes all calls but `stats`. A refused call changes nothing and raises a subclass of `EngineError`.
    """

    def __init__(self, library: ctypes.CDLL, options: abi.EngineOptions, tensors: Any) -> None:
        """Map the files and plan all memory.

        `tensors` is a NumPy array of shape `[count]` whose records have the layout of `abi.Tensor`; it has none where
        `options.synthetic_seed` asks for random weights.
        """
        if tensors.dtype.itemsize != ctypes.sizeof(abi.Tensor) or not tensors.flags.c_contiguous:
            raise EngineError(
                f"the tensor table has records of {tensors.dtype.itemsize} bytes; contiguous records of "
                f"{ctypes.sizeof(abi.Tensor)} bytes are needed"
            )
        self._library = library
        self._engine = ctypes.POINTER(abi.Engine)()
        table = tensors.ctypes.data_as(ctypes.POINTER(abi.Tensor))
        status = library.glint_init_engine(ctypes.byref(options), table, tensors.shape[0], ctypes.byref(self._engine))
        _check(library, "glint_init_engine", status)
        self._release = weakref.finalize(self, _free_engine, library, self._engine)
        self._step_items = (abi.StepItem * options.max_step_items)()

    @property
    def backend_name(self) -> str:
        """The backend that computes, as the library names it."""
        return str(self._library.glint_backend_name().decode())

    def close(self) -> None:
        """End the engine and everything it holds. Calling it again does nothing."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add_request(self, request: abi.Request) -> int:
        """Copy a request into the engine and return its id. It takes no pages yet."""
        request_id = ctypes.c_uint64()
        self._call("glint_add_request", ctypes.byref(request), ctypes.byref(request_id))
        return request_id.value

    def free_request(self, request_id: int) -> None:
        """Forget a request and give its pages back."""
        self._call("glint_free_request", request_id)

    def release_pages(self, request_id: int) -> None:
        """Give a request's pages back; its known tokens stay and will be computed anew."""
        self._call("glint_release_pages", request_id)

    def limit_reuse(self, request_id: int, reusable_tokens: int) -> None:
        """Say that later requests can share only the first tokens of a request: its other pages are evicted first."""
        self._call("glint_limit_reuse", request_id, reusable_tokens)

    def submit_step(self, items: Sequence[tuple[int, int]], drafts: Sequence[int] = ()) -> abi.Ticket:
        """Start a forward pass over (request id, tokens to advance) pairs, and say how many drafts to make for each.

        Raises `OutOfPages` with the number of missing pages, having changed nothing.
        """
        if len(items) > len(self._step_items):
            self._step_items = (abi.StepItem * len(items))()
        for index, ((request_id, advance), num_drafts) in enumerate(zip(items, drafts or repeat(0), strict=False)):
            _STEP_ITEM.pack_into(self._step_items, index * _STEP_ITEM.size, request_id, advance, num_drafts, 0, 0)
        ticket = abi.sized(abi.Ticket)
        function = self._live_function("glint_submit_step")
        status = function(self._engine, self._step_items, len(items), ctypes.byref(ticket))
        if status == abi.STATUS_OUT_OF_PAGES:
            raise OutOfPages(f"the step needs {ticket.missing_pages} more pages than there are", ticket.missing_pages)
        _check(self._library, "glint_submit_step", status)
        return ticket

    def submitted_item(self, index: int) -> abi.StepItem:
        """An item of the last submitted step with its `first_position` and `cached_tokens`, until the next submit."""
        item: abi.StepItem = self._step_items[index]
        return item

    def sample_step(self, ticket: abi.Ticket, masks: abi.Masks | None = None) -> None:
        """Start the sampling of a submitted step; exactly once per step."""
        self._call("glint_sample_step", ctypes.byref(ticket), masks and ctypes.byref(masks))

    def collect_step(self, ticket: abi.Ticket) -> StepOutcome:
        """Wait for a step and copy its results."""
        results = abi.sized(abi.StepResults)
        self._call("glint_collect_step", ctypes.byref(ticket), ctypes.byref(results))
        return _read_results(results)

    def drop_steps(self) -> None:
        """Bring every step in flight to its end, wherever it was left, and drop the results."""
        if not self._release.alive:
            return
        stats = self.stats()
        for step in range(stats.steps_done + 1, stats.steps_done + 1 + stats.steps_in_flight):
            ticket = ctypes.byref(abi.sized(abi.Ticket, step=step))
            self._library.glint_sample_step(self._engine, ticket, None)
            self._library.glint_collect_step(self._engine, ticket, ctypes.byref(abi.sized(abi.StepResults)))

    def stats(self) -> abi.EngineStats:
        """Counters of the engine; may be called from any thread."""
        stats = abi.sized(abi.EngineStats)
        self._call("glint_stats", ctypes.byref(stats))
        return stats

    def check(self) -> None:
        """Check the engine's own books; raises where something does not add up."""
        self._call("glint_check")

    def measure_read(self, byte_count: int) -> float:
        """Read `byte_count` bytes of memory with all threads, best of a few times; bytes per second."""
        bytes_per_second = ctypes.c_double()
        self._call("glint_measure_read", byte_count, ctypes.byref(bytes_per_second))
        return bytes_per_second.value

    def measure_arithmetic(self) -> abi.Arithmetic:
        """Multiply-adds and E4M3 weights per second of all threads together, each the best of a few times."""
        arithmetic = abi.sized(abi.Arithmetic)
        self._call("glint_measure_arithmetic", ctypes.byref(arithmetic))
        return arithmetic

    def _live_function(self, name: str) -> Any:
        if not self._release.alive:
            raise EngineError(f"{name} was called after the engine was closed; make a new engine")
        return getattr(self._library, name)

    def _call(self, name: str, *arguments: Any) -> None:
        _check(self._library, name, self._live_function(name)(self._engine, *arguments))


def _read_results(results: abi.StepResults) -> StepOutcome:
    """Copy results out of the engine's memory, log-probabilities grouped by item and position."""
    count = results.item_count
    logprobs: list[dict[int, dict[int, float]]] = [{} for _ in range(count)]
    if results.logprob_count:
        raw = ctypes.string_at(results.logprobs, results.logprob_count * _LOGPROB.size)
        for item, position, token, logprob in _LOGPROB.iter_unpack(raw):
            logprobs[item].setdefault(position, {})[token] = logprob
    records = [*_ITEM_RESULT.iter_unpack(ctypes.string_at(results.items, count * _ITEM_RESULT.size))]
    first, tokens = _read_tokens([(record[-2], record[1]) for record in records if record[1]])
    items = []
    for record, entries in zip(records, logprobs, strict=True):
        request_id, num_tokens, finish, failure, cached, computed, num_drafts, begin, verified = record[:-2]
        address, draft_address = record[-2:]
        place = (address - first) // _TOKEN_BYTES
        new = tuple(tokens[place : place + num_tokens]) if num_tokens else ()
        drafts = tuple(_read_tokens([(draft_address, num_drafts)])[1]) if num_drafts else ()
        items.append(ItemOutcome(request_id, new, finish, failure, cached, computed, entries, drafts, begin, verified))
    return StepOutcome(tuple(items), results.pages_free, results.pages_held, results.pages_cached)


def _read_tokens(places: Sequence[tuple[int, int]]) -> tuple[int, memoryview]:
    """Copy the tokens of all items, which lie in one array, at once: where they begin, and what is there."""
    if not places:
        return 0, memoryview(b"")
    first = min(address for address, _ in places)
    end = max(address + count * _TOKEN_BYTES for address, count in places)
    return first, memoryview(ctypes.string_at(first, end - first)).cast("i")
