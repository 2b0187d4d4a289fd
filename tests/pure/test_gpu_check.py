"""What `glint check --gpu` prints of a GPU and of its self-test, without a GPU."""

from ctypes import CDLL, sizeof
from pathlib import Path

import pytest

from glint import cli
from glint.errors import EngineError
from glint.gpu import check
from glint.gpu.self_test import MODELS, Libraries, Row, models_for
from glint.native import abi

PASSED = Row("GLM-4.7, BF16 pages", "prefill, error of log-probabilities, median", "0.0123", "at most 0.4", True)
FAILED = Row("GLM-4.7, BF16 pages", "decode, batch of 64 as alone", "63 of 64", "all, bit by bit", False)


def device(num_devices: int = 1, peers: int = 0, driver: bytes = b"580.95.05") -> abi.Device:
    """A B200 as the library describes it."""
    return abi.Device(
        struct_bytes=sizeof(abi.Device),
        num_devices=num_devices,
        compute_major=10,
        compute_minor=0,
        driver_version=13010,
        runtime_version=13000,
        kernels=abi.KERNELS_PORTABLE,
        num_multiprocessors=148,
        shared_bytes=227 * 1024,
        memory_total=191_000_000_000,
        memory_free=190_500_000_000,
        peers=peers,
        name=b"NVIDIA B200",
        driver=driver,
        kernels_reason=b"compute capability 10.0 has no wgmma",
        code=b"machine code for sm_100",
        nccl=b"2.32.3 (libnccl.so.2)",
    )


def test_a_gpu_is_described_in_full() -> None:
    assert check.describe(device(), 0) == {
        "device": "NVIDIA B200",
        "compute capability": "10.0",
        "driver": "580.95.05, supports CUDA 13.1",
        "runtime": "CUDA 13.0",
        "kernels": "portable: compute capability 10.0 has no wgmma",
        "code": "machine code for sm_100",
        "multiprocessors": "148",
        "shared memory": "227 KiB for a thread block",
        "memory": "191.0 GB, 190.5 GB free",
        "peer access": "no other GPU is visible",
        "NCCL": "2.32.3 (libnccl.so.2)",
    }
    assert check.describe(device(driver=b""), 0)["driver"] == "supports CUDA 13.1"


@pytest.mark.parametrize(
    ("index", "peers", "text"),
    [
        (0, 0b1110, "reaches every other GPU"),
        (1, 0b0101, "does not reach GPU 3:"),
        (2, 0, "does not reach GPU 0, 1, 3:"),
    ],
)
def test_peers_are_named(index: int, peers: int, text: str) -> None:
    assert check.describe(device(4, peers), index)["peer access"].startswith(text)


@pytest.mark.parametrize(("num_devices", "tp"), [(1, 1), (2, 2), (3, 2), (8, 8), (16, 8)])
def test_several_gpus_share_a_model(num_devices: int, tp: int) -> None:
    models = models_for(num_devices)
    assert models[: len(MODELS)] == MODELS
    assert [model.tp for model in models[len(MODELS) :]] == ([tp] if tp > 1 else [])


@pytest.mark.parametrize(
    ("rows", "code", "words"),
    [
        ([PASSED], 0, ["passed", "0.0123", "at most 0.4", "1 checks passed in"]),
        ([PASSED, FAILED], 1, ["FAILED", "63 of 64", "1 of 2 checks failed in", "--kernels portable"]),
    ],
)
def test_a_failed_row_is_exit_code_1(
    rows: list[Row], code: int, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "run_self_test", lambda *_: iter(rows))
    library = CDLL(None)
    assert check.report(Libraries(library, "cuda", "auto", library), 1) == code
    printed = capsys.readouterr().out
    assert all(word in printed for word in words), printed


def test_without_a_library_the_way_out_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(device: str, path: Path | None) -> Path:
        raise EngineError(f"no native library for device {device!r}; build it")

    monkeypatch.setattr(check, "choose_library", refuse)
    assert cli.main(["check", "--gpu"]) == 1
    assert "no native library for device 'cuda'; build it" in capsys.readouterr().err


def test_kernels_of_the_cpu_are_refused() -> None:
    with pytest.raises(EngineError, match="kernels is 'exact'"):
        check.check_settings("exact")
