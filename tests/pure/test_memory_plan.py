"""The memory plan of a GPU: its arithmetic, what is taken, and what is refused with which words."""

from __future__ import annotations

import ctypes
import io
from dataclasses import replace
from typing import Any

import pytest

from glint.engine import memory_plan
from glint.engine.args import EngineArgs
from glint.engine.memory_plan import COLUMNS, GpuPlan, SizedEngine, choose_pages, size_engine
from glint.errors import EngineError
from glint.native import abi
from glint.terminal import plain_table, print_table
from tests.pure.test_engine_settings import SAMPLE

GIB = 2**30
MIB = 2**20
H200 = GpuPlan(
    device_name="NVIDIA H200",
    memory_total=140 * GIB,
    memory_free=139 * GIB,
    utilization=0.9,
    weight_bytes=41 * GIB,
    workspace_bytes=2 * GIB,
    pinned_bytes=256 * MIB,
    bytes_per_page=2 * MIB,
    page_tokens=64,
    max_model_len=200_000,
    max_requests=256,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[abi.EngineOptions]:
    """A library that plans as the GPU above would, and the options that it was asked about."""
    asked: list[abi.EngineOptions] = []

    def plan_engine(library: ctypes.CDLL, options: abi.EngineOptions) -> abi.EnginePlan:
        asked.append(options)
        names = ("memory_total", "memory_free", "weight_bytes", "workspace_bytes", "pinned_bytes", "bytes_per_page")
        return abi.sized(abi.EnginePlan, device_name=b"NVIDIA H200", **{name: getattr(H200, name) for name in names})

    monkeypatch.delenv("GLINT_KERNELS", raising=False)
    monkeypatch.setattr(memory_plan, "open_library", lambda device, path: path)
    monkeypatch.setattr(memory_plan, "plan_engine", plan_engine)
    return asked


def size(**options: Any) -> SizedEngine:
    return size_engine("folder", SAMPLE, (), EngineArgs(device="cuda", **options), "library")


def test_what_is_left_becomes_pages() -> None:
    assert H200.room_bytes == (126 - 1 - 41 - 2) * GIB
    assert H200.fitting_pages == H200.num_pages == 82 * 512
    assert (H200.context_pages, H200.wanted_pages) == (3125, 3125 * 256)
    assert replace(H200, max_requests=2).num_pages == 2 * 3125
    assert replace(H200, weight_bytes=130 * GIB).fitting_pages == 0


def test_the_table_adds_up() -> None:
    text = plain_table(COLUMNS, H200.rows(1000, 64_000))
    for amount in (
        "140.00 GiB",
        "126.00 GiB",
        "1.00 GiB",
        "41.00 GiB",
        "2.00 GiB",
        "82.00 GiB",
        "2.00 MiB",
        "1.95 GiB",
    ):
        assert amount in text
    assert "1,000 pages" in text and "64,000 tokens" in text and "41,984 pages fit" in text


def test_ranks_on_gpus_of_their_own_take_as_much_on_each() -> None:
    eight = replace(H200, tp=8)
    assert eight.room_bytes == (126 - 1 - 41 - 2 - 1) * GIB
    assert eight.num_pages == 81 * 512
    text = plain_table(COLUMNS, eight.rows(eight.num_pages, 200_000))
    assert "of 8 GPUs the one with the least free" in text
    lines = {line.split("  ")[1].strip(): line for line in text.splitlines()}
    assert "1.00 GiB" in lines["- NCCL"] and "8 ranks" in lines["- NCCL"]
    assert "1,000.00 GiB" in lines["x 8 GPUs"] and "125.00 GiB on each" in lines["x 8 GPUs"]
    assert "NCCL" not in plain_table(COLUMNS, H200.rows(1, 1))


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    shared = replace(H200, tp=2, is_shared=True)
    assert shared.allowed_bytes == (126 - 1) * GIB // 2
    assert 2 * (shared.taken_bytes + shared.num_pages * shared.bytes_per_page) <= 125 * GIB
    assert shared.num_pages == 18 * 512 + 256
    text = plain_table(COLUMNS, shared.rows(shared.num_pages, 200_000))
    assert "/ 2 ranks" in text and "62.50 GiB" in text and "x 2 ranks" in text


def test_an_engine_of_several_ranks_is_planned_for_one(
    gpu: list[abi.EngineOptions], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sized = size(tp=3, gpu_memory_utilization=0.4, max_num_seqs=1000)
    assert (gpu[0].num_ranks, gpu[0].row_slices) == (3, 3)
    assert sized.settings.num_pages == (56 - 45) * 512
    sized.show()
    assert "memory plan of one rank" in capsys.readouterr().err
    monkeypatch.setenv("GLINT_SHARED_DEVICES", "1")
    shared = size(tp=3, max_num_seqs=1000, gpu_memory_utilization=1.0)
    assert shared.plan is not None and shared.plan.is_shared
    assert shared.settings.num_pages == (139 * GIB // 3 - 44 * GIB) // (2 * MIB)
    with pytest.raises(EngineError, match="share the model among more of them with --tp"):
        size(tp=3)
    with pytest.raises(EngineError, match="num_attention_heads 9 cannot be split over 2 ranks"):
        size(tp=2)


def test_an_engine_takes_what_the_gpu_has(gpu: list[abi.EngineOptions]) -> None:
    sized = size()
    assert (sized.settings.num_pages, sized.settings.max_model_len) == (8192 // 64 * 256, 8192)
    assert (gpu[0].num_pages, gpu[0].max_context_tokens, gpu[0].max_step_tokens) == (1, 8192, 4096)
    assert sized.plan is not None and sized.plan.utilization == 0.9
    lower = size(gpu_memory_utilization=0.4, max_num_seqs=1000)
    assert lower.settings.num_pages == (56 - 44) * 512
    assert size(max_model_len=100, max_num_seqs=3).settings.num_pages == 2 * 3


def test_pages_and_bytes_may_be_asked_for(gpu: list[abi.EngineOptions]) -> None:
    few = size(num_pages=10).settings
    assert (few.num_pages, few.max_model_len) == (10, 640)
    assert size(kv_cache_bytes=21 * MIB).settings.num_pages == 10
    with pytest.raises(EngineError, match="both given"):
        size(num_pages=10, kv_cache_bytes=21 * MIB)
    with pytest.raises(EngineError, match="less than one page of 2097152"):
        size(kv_cache_bytes=MIB)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gpu_memory_utilization": 0.3}, ("does not fit into the memory", "--max-num-batched-tokens")),
        ({"num_pages": 50_000}, ("50,000 pages does not fit, only 41,984 do", "raise --gpu-memory-utilization")),
        ({"num_pages": 10, "max_model_len": 641}, ("needs 11 pages, there are 10", "lower --max-model-len to 640")),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(
    gpu: list[abi.EngineOptions], options: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(EngineError) as refused:
        size(**options)
    for words in (*named, "GPU memory", "- weights", "= left for pages", "one page"):
        assert words in str(refused.value)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.1])
def test_a_share_is_over_zero_and_up_to_one(gpu: list[abi.EngineOptions], share: float) -> None:
    with pytest.raises(EngineError, match="it is a share over 0 and up to 1"):
        size(gpu_memory_utilization=share)


def test_a_bad_setting_is_refused_before_the_gpu_is_asked(gpu: list[abi.EngineOptions]) -> None:
    with pytest.raises(EngineError, match="kernels is 'exact'"):
        size(kernels="exact")
    assert gpu == []


def test_the_cpu_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLINT_KERNELS", raising=False)
    sized = size_engine("folder", SAMPLE, (), EngineArgs(num_pages=512))
    assert sized.plan is None and sized.settings.device == "cpu"
    with pytest.raises(EngineError, match=r"gpu_memory_utilization is 0\.9, but device is 'cpu'"):
        size_engine("folder", SAMPLE, (), EngineArgs(gpu_memory_utilization=0.9))


def test_pages_are_never_more_than_the_abi_takes() -> None:
    plan = replace(H200, bytes_per_page=1, max_requests=2**16)
    assert plan.wanted_pages > 2**26 and plan.fitting_pages > 2**26
    assert choose_pages(plan, EngineArgs()) == 2**26


def test_a_plan_is_shown_on_standard_error(gpu: list[abi.EngineOptions], capsys: pytest.CaptureFixture[str]) -> None:
    size().show()
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("memory plan\n") and "NVIDIA H200" in captured.err


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_table_is_framed_on_a_terminal_alone() -> None:
    rows = [("a", "1"), ("bb", "22")]
    plain, framed = io.StringIO(), Terminal()
    print_table("title", ("name", "n"), rows, plain)
    print_table("title", ("name", "n"), rows, framed)
    assert plain.getvalue() == "title\n  name   n\n  a      1\n  bb    22\n"
    assert "\N{BOX DRAWINGS LIGHT VERTICAL}" in framed.getvalue() and "22" in framed.getvalue()
