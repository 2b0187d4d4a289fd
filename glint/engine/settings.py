"""Settings of an engine: its options, completed from the machine and the model, and checked."""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, cast, get_args, get_origin

from glint.checkpoint.config import ModelConfig
from glint.checkpoint.quantisation import ScaleKind
from glint.engine.args import Device, EngineArgs, EngineChoices, Kernels, value_types
from glint.engine.drafts import AUTO_DRAFTS, MAX_SPECULATIVE_TOKENS
from glint.engine.ranks import check_slices, check_split
from glint.errors import EngineError

DEVICE_KERNELS: dict[Device, tuple[Kernels, ...]] = {
    "cpu": ("auto", "exact", "plain", "neon", "neon_bf16", "avx2", "avx512", "avx512_bf16", "amx"),
    "cuda": ("auto", "portable", "hopper"),
}
KERNELS_VARIABLE = "GLINT_KERNELS"
SHARED_DEVICES_VARIABLE = "GLINT_SHARED_DEVICES"
DEFAULT_PAGE_TOKENS: dict[Device, int] = {"cpu": 16, "cuda": 64}
DEFAULT_STEP_TOKENS: dict[Device, int] = {"cpu": 512, "cuda": 4096}
DEFAULT_NUM_SEQS: dict[Device, int] = {"cpu": 64, "cuda": 256}
DEFAULT_CACHE_BYTES = 384 * 2**20
CACHE_SHARE_OF_MEMORY = 4
MAX_COUNT = 2**31 - 1
MAX_PAGES = 2**26
MAX_STEP_ROWS = 2**14
MAX_AUTO_STEP_DRAFTS: dict[Device, int] = {"cpu": MAX_STEP_ROWS, "cuda": 128}
MAX_PAGE_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class EngineSettings(EngineChoices):
    """Everything that is fixed for the life of an engine. Nothing is left to be filled in later.

    The names are those of `EngineArgs`. Each rank has at least one of the `threads` and a page cache of `num_pages`
    pages. `max_model_len` always fits in the page cache. `num_speculative_tokens` is the most drafts of a request;
    with `adapts_drafts` every step chooses, and `max_step_drafts` bounds those of all requests together. With
    `shares_devices` ranks may have one GPU in common, for tests.
    """

    model_dir: Path
    kernels: Kernels
    threads: int
    row_slices: int
    page_tokens: int
    num_pages: int
    max_step_tokens: int
    max_num_seqs: int
    max_requests: int
    max_model_len: int
    num_speculative_tokens: int = 0
    adapts_drafts: bool = False
    shares_devices: bool = False

    @property
    def max_step_drafts(self) -> int:
        """The most drafts that one step verifies; where the engine chooses, a GPU has room for few of them."""
        return _step_drafts(self.device, self.max_num_seqs, self.num_speculative_tokens, self.adapts_drafts)

    def __post_init__(self) -> None:
        check_slices(self.tp, self.row_slices)
        for name, kind in _TYPES.items():
            if get_origin(kind) is Literal:
                _check_choice(name, getattr(self, name), get_args(kind))
            elif kind is int and name != "num_speculative_tokens":
                _check_count(name, getattr(self, name))
        self._check_drafts()
        self._check_device()
        if self.page_tokens > MAX_PAGE_TOKENS or MAX_PAGE_TOKENS % self.page_tokens:
            raise EngineError(f"page_tokens is {self.page_tokens}; it must be a power of two up to {MAX_PAGE_TOKENS}")
        if self.max_model_len < 2:
            raise EngineError(f"max_model_len is {self.max_model_len}; a prompt and an answer need at least 2 tokens")
        if self.max_requests < self.max_num_seqs:
            raise EngineError(
                f"max_requests is {self.max_requests}, less than max_num_seqs {self.max_num_seqs}; "
                "raise the first or lower the second"
            )
        if self.max_model_len > self.num_pages * self.page_tokens:
            raise EngineError(
                f"max_model_len is {self.max_model_len}, but {self.num_pages} pages of {self.page_tokens} tokens hold "
                f"{self.num_pages * self.page_tokens}; lower max_model_len or give the page cache more memory"
            )

    def _check_drafts(self) -> None:
        count = self.num_speculative_tokens
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_SPECULATIVE_TOKENS:
            raise EngineError(
                f"num_speculative_tokens is {count!r}; it must be an integer from 0 to {MAX_SPECULATIVE_TOKENS}, "
                "or 'auto'"
            )
        rows = self.max_num_seqs * (1 + count)
        if count and rows > MAX_STEP_ROWS:
            raise EngineError(
                f"--max-num-seqs {self.max_num_seqs} with --num-speculative-tokens {count} makes {rows} rows to sample "
                f"in a step, at most {MAX_STEP_ROWS} fit; lower --max-num-seqs to {MAX_STEP_ROWS // (1 + count)} or "
                "less, or lower --num-speculative-tokens"
            )
        if count >= self.max_step_tokens:
            raise EngineError(
                f"--num-speculative-tokens {count} with --max-num-batched-tokens {self.max_step_tokens}: a request "
                "verifies its drafts and one token in one step; lower --num-speculative-tokens to "
                f"{self.max_step_tokens - 1} or less, or raise --max-num-batched-tokens"
            )

    def _check_device(self) -> None:
        kernels = DEVICE_KERNELS[self.device]
        if self.kernels not in kernels:
            other = next(device for device, names in DEVICE_KERNELS.items() if self.kernels in names)
            raise EngineError(
                f"kernels is {self.kernels!r}, which device {other!r} has and {self.device!r} has not; choose one of "
                f"{', '.join(kernels)} with --kernels or ${KERNELS_VARIABLE}, or device {other!r}"
            )
        if self.device != "cuda":
            if self.all_reduce != "auto":
                raise EngineError(
                    f"all_reduce is {self.all_reduce!r}, but the ranks of device {self.device!r} share their memory; "
                    "leave --all-reduce out, or use --device cuda"
                )
            if self.kv_cache_dtype != "auto":
                raise EngineError(
                    f"kv_cache_dtype is {self.kv_cache_dtype!r}, but device {self.device!r} has one kind of page; "
                    "leave --kv-cache-dtype out, or use --device cuda"
                )
            return
        if self.page_tokens != DEFAULT_PAGE_TOKENS["cuda"]:
            raise EngineError(
                f"page_tokens is {self.page_tokens}; the CUDA kernels have pages of {DEFAULT_PAGE_TOKENS['cuda']} "
                "tokens, leave it out"
            )
        if self.row_slices != self.tp:
            raise EngineError(
                f"row_slices is {self.row_slices} and tp is {self.tp}; on device 'cuda' they are equal, leave "
                "row_slices out"
            )

    @classmethod
    def resolve(
        cls, model_dir: str | Path, model: ModelConfig, args: EngineArgs, has_mtp: bool = False
    ) -> "EngineSettings":
        """Complete the options from the machine and the model, whose checkpoint has an MTP layer or not.

        Threads are the cores this process may use; kernels those of $GLINT_KERNELS where it is set. On the CPU the page
        cache takes `num_pages`, else `kv_cache_bytes`, else what the longest request needs and at least 384 MiB, never
        over a quarter of the free memory; on a GPU `num_pages` comes from `memory_plan.size_engine`. Without
        `max_model_len` the context is what model and page cache allow. Raises `EngineError` with all reasons where
        something does not fit. Ranks may have one GPU in common where $GLINT_SHARED_DEVICES is 1.
        """
        for name in ("device", "expert_layout"):
            _check_choice(name, getattr(args, name), get_args(_TYPES[name]))
        _check_asked(model, args)
        device, tp = args.device, args.tp
        page_tokens = _given(args.page_tokens, DEFAULT_PAGE_TOKENS[device])
        _check_count("page_tokens", page_tokens)
        max_num_seqs = _given(args.max_num_seqs, DEFAULT_NUM_SEQS[device])
        adapts_drafts = args.num_speculative_tokens == "auto"
        if adapts_drafts:
            args = replace(args, num_speculative_tokens=_auto_drafts(args, max_num_seqs) if has_mtp else 0)
        row_slices = tp if args.row_slices is None else args.row_slices
        check_split(model, tp, row_slices, args.expert_layout)
        num_pages = _count_pages(model, args, page_tokens) if args.num_pages is None else args.num_pages
        return cls(
            model_dir=Path(model_dir),
            **{choice.name: getattr(args, choice.name) for choice in fields(EngineChoices)},
            kernels=cast(Kernels, args.kernels or os.environ.get(KERNELS_VARIABLE) or "auto"),
            threads=count_usable_cores() if args.threads is None else args.threads,
            num_speculative_tokens=cast(int, args.num_speculative_tokens),
            adapts_drafts=adapts_drafts,
            shares_devices=os.environ.get(SHARED_DEVICES_VARIABLE) == "1",
            row_slices=row_slices,
            page_tokens=page_tokens,
            num_pages=num_pages,
            max_step_tokens=_given(args.max_step_tokens, _default_step_tokens(args, max_num_seqs, adapts_drafts)),
            max_num_seqs=max_num_seqs,
            max_requests=_given(args.max_requests, max_num_seqs),
            max_model_len=_given(args.max_model_len, min(model.max_positions, num_pages * page_tokens)),
        )


_TYPES = value_types(EngineSettings)


def _auto_drafts(args: EngineArgs, max_num_seqs: int) -> int:
    """The most drafts of a request where the engine chooses; prompts keep a page and half of a step."""
    _check_count("max_num_seqs", max_num_seqs)
    rows = MAX_STEP_ROWS
    if args.max_step_tokens is not None:
        page_tokens = _given(args.page_tokens, DEFAULT_PAGE_TOKENS[args.device])
        rows = min(rows, args.max_step_tokens - max(page_tokens, args.max_step_tokens // 2))
    fitting = rows // max_num_seqs - 1
    has_room = rows - max_num_seqs >= _step_drafts(args.device, max_num_seqs, AUTO_DRAFTS, adapts_drafts=True)
    return AUTO_DRAFTS if has_room else max(0, min(AUTO_DRAFTS, fitting))


def _step_drafts(device: Device, max_num_seqs: int, num_drafts: int, adapts_drafts: bool) -> int:
    """The most drafts of a step: those of every request, unless the engine chooses and the device has fewer."""
    drafts = max_num_seqs * num_drafts
    return min(drafts, MAX_AUTO_STEP_DRAFTS[device]) if adapts_drafts else drafts


def _default_step_tokens(args: EngineArgs, max_num_seqs: int, adapts_drafts: bool) -> int:
    """The tokens of a step; where requests draft, their drafts come on top, so that prompts keep their room."""
    drafts = args.num_speculative_tokens if isinstance(args.num_speculative_tokens, int) else 0
    return DEFAULT_STEP_TOKENS[args.device] + _step_drafts(args.device, max_num_seqs, drafts, adapts_drafts)


def _given(asked: int | None, default: int) -> int:
    return default if asked is None else asked


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise EngineError(f"{name} is {value!r}; choose one of {', '.join(allowed)}")


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise EngineError(f"{name} is {value!r}; it must be an integer from 1 to {MAX_COUNT}")


def _check_asked(model: ModelConfig, args: EngineArgs) -> None:
    """Refuse a device that cannot compute this model, and sizes that no engine of it can have."""
    if args.device == "cuda" and model.input_group_size:
        raise EngineError(
            f"the checkpoint asks for activations in groups of {model.input_group_size}, one scale each, and the CUDA "
            "kernels quantise with one scale per token; run it with --device cpu, or use a checkpoint with scales per "
            "channel and token, such as GLM-4.7-FP8"
        )
    for name in ("num_pages", "max_model_len", "max_step_tokens"):
        if getattr(args, name) is not None:
            _check_count(name, getattr(args, name))
    if args.max_model_len is not None and args.max_model_len > model.max_positions:
        raise EngineError(
            f"max_model_len is {args.max_model_len}, but the model knows {model.max_positions} positions; lower it"
        )
    if args.num_pages is not None and args.kv_cache_bytes is not None:
        raise EngineError(
            f"num_pages {args.num_pages} and kv_cache_bytes {args.kv_cache_bytes} are both given; give one"
        )


def token_cache_bytes(model: ModelConfig, device: Device, tp: int = 1, has_mtp: bool = False) -> int:
    """Bytes of keys and values that one token keeps on all ranks: FP32 for a BF16 checkpoint on the CPU, else BF16.

    Every rank keeps at least one head, so more ranks than heads keep copies. The MTP layer is one layer more.
    """
    is_wide = device == "cpu" and model.weight_scale_kind == ScaleKind.NONE
    return 2 * (model.num_layers + has_mtp) * max(model.num_kv_heads, tp) * model.head_dim * (4 if is_wide else 2)


def page_cache_bytes(model: ModelConfig, device: Device, page_tokens: int, tp: int = 1, has_mtp: bool = False) -> int:
    """Bytes of one page on all ranks. For the MTP layer every rank keeps the hidden state at its end, in FP32."""
    hidden_bytes = 4 * model.hidden_size * tp if has_mtp else 0
    return page_tokens * token_cache_bytes(model, device, tp, has_mtp) + hidden_bytes


def _count_pages(model: ModelConfig, args: EngineArgs, page_tokens: int) -> int:
    """Pages for `kv_cache_bytes`, or for the default without it."""
    device, kv_cache_bytes, max_model_len = args.device, args.kv_cache_bytes, args.max_model_len
    if device != "cpu":
        raise EngineError(f"num_pages is not given; on device {device!r} glint.engine.memory_plan.size_engine finds it")
    page_bytes = page_cache_bytes(model, device, page_tokens, args.tp, args.num_speculative_tokens != 0)
    free_bytes = read_free_memory()
    if kv_cache_bytes is not None:
        if kv_cache_bytes > free_bytes:
            raise EngineError(
                f"kv_cache_bytes is {kv_cache_bytes}, but {free_bytes} bytes of memory are free; ask for less"
            )
        if kv_cache_bytes < page_bytes:
            raise EngineError(f"kv_cache_bytes is {kv_cache_bytes}, less than one page of {page_bytes}; ask for more")
        return kv_cache_bytes // page_bytes
    longest = model.max_positions if max_model_len is None else max_model_len
    longest_pages = -(-longest // page_tokens)
    wanted_pages = max(longest_pages, DEFAULT_CACHE_BYTES // page_bytes)
    allowed_pages = free_bytes // CACHE_SHARE_OF_MEMORY // page_bytes
    if allowed_pages == 0 or (max_model_len is not None and allowed_pages < longest_pages):
        raise EngineError(
            f"a context of {longest} tokens needs {longest_pages * page_bytes} bytes of page cache, more than a "
            f"quarter of the free memory ({free_bytes} bytes); lower max_model_len or set kv_cache_bytes"
        )
    return min(wanted_pages, allowed_pages, MAX_PAGES)


def count_usable_cores() -> int:
    """Cores that this process may use: its affinity, and the processor quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    quota = _read_words(Path("/sys/fs/cgroup/cpu.max"))
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def read_free_memory() -> int:
    """Bytes that can be taken without swapping: the machine's, or less where the control group has a limit."""
    words = _read_words(Path("/proc/meminfo"))
    if "MemAvailable:" not in words:
        raise EngineError("/proc/meminfo does not say MemAvailable; set num_pages or kv_cache_bytes")
    free_bytes = int(words[words.index("MemAvailable:") + 1]) * 1024
    limit = _read_words(Path("/sys/fs/cgroup/memory.max"))
    used = _read_words(Path("/sys/fs/cgroup/memory.current"))
    if limit and limit[0].isdigit() and used:
        free_bytes = min(free_bytes, max(0, int(limit[0]) - int(used[0])))
    return free_bytes


def _read_words(path: Path) -> list[str]:
    """The words of a small system file; none where this system does not have it."""
    return path.read_text().split() if path.exists() else []
