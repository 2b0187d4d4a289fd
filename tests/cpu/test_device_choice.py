"""Which kernels a GPU gets and which GPUs and drivers are refused: the CUDA library's rules, without a GPU."""

from ctypes import POINTER, byref, c_char_p, c_int32, c_uint64

import pytest

from glint.native import abi
from glint.native.library import InvalidArgument, Unsupported, choose_library, describe_device, load_library
from tests.cpu.testing_library import declare

NEEDED_BYTES = 227 * 1024
AUTO, PORTABLE, HOPPER = abi.KERNELS_AUTO, abi.KERNELS_PORTABLE, abi.KERNELS_HOPPER


def choose(
    requested: int, name: str, major: int, minor: int, shared: int = NEEDED_BYTES, ptx: bool = False
) -> tuple[int, str]:
    """The kernel set with its reason and code, or the status with the refusal."""
    function = declare(
        "glint_testing_choose_kernels",
        c_int32,
        *(c_int32, c_char_p, c_int32, c_int32, c_uint64, c_uint64, c_int32, POINTER(c_int32)),
    )
    kernels = c_int32()
    status = function(requested, name.encode(), major, minor, shared, NEEDED_BYTES, ptx, byref(kernels))
    if status == abi.STATUS_OK:
        return kernels.value, declare("glint_testing_choice_text", c_char_p)().decode()
    return -status, declare("glint_testing_choice_error", c_char_p)().decode()


@pytest.mark.parametrize(
    ("name", "capability", "ptx", "kernels", "words"),
    [
        ("NVIDIA H200", (9, 0), False, HOPPER, ["9.0 has wgmma", "machine code for sm_90a and sm_90"]),
        ("NVIDIA H200", (9, 0), True, PORTABLE, ["wgmma has no PTX", "compute_90 PTX", "CUDA_FORCE_PTX_JIT"]),
        ("NVIDIA B200", (10, 0), False, PORTABLE, ["10.0 has no wgmma", "machine code for sm_100"]),
        ("NVIDIA B300", (10, 3), False, PORTABLE, ["10.3 has no wgmma", "machine code for sm_100"]),
        ("NVIDIA B200", (10, 0), True, PORTABLE, ["10.0 has no wgmma", "CUDA_FORCE_PTX_JIT"]),
        ("NVIDIA Rubin", (12, 1), False, PORTABLE, ["12.1 has no wgmma", "no machine code for this GPU"]),
    ],
)
def test_every_gpu_gets_its_kernels(
    name: str, capability: tuple[int, int], ptx: bool, kernels: int, words: list[str]
) -> None:
    chosen, text = choose(AUTO, name, *capability, ptx=ptx)
    assert chosen == kernels
    assert all(word in text for word in words), text


def test_a_set_that_is_asked_for_is_taken_where_it_runs() -> None:
    chosen, text = choose(PORTABLE, "NVIDIA H200", 9, 0)
    assert chosen == PORTABLE and text == "asked for; compute capability 9.0 has wgmma; machine code for sm_90"
    assert choose(HOPPER, "NVIDIA H200", 9, 0)[0] == HOPPER


@pytest.mark.parametrize(
    ("requested", "capability", "ptx"),
    [(HOPPER, (10, 0), False), (HOPPER, (9, 0), True), (abi.KERNELS_NEON, (9, 0), False)],
)
def test_a_set_that_the_gpu_cannot_run_is_refused(requested: int, capability: tuple[int, int], ptx: bool) -> None:
    status, text = choose(requested, "NVIDIA B200", *capability, ptx=ptx)
    assert status == -abi.STATUS_UNSUPPORTED
    assert f"options.kernels is {requested}, which NVIDIA B200 cannot run" in text and "portable (7)" in text


@pytest.mark.parametrize(
    ("name", "capability", "shared"),
    [("NVIDIA A100-SXM4-80GB", (8, 0), 163 * 1024), ("NVIDIA GeForce RTX 5090", (12, 0), 99 * 1024)],
)
def test_a_gpu_that_cannot_run_any_is_refused_by_name(name: str, capability: tuple[int, int], shared: int) -> None:
    status, text = choose(AUTO, name, *capability, shared=shared)
    assert status == -abi.STATUS_UNSUPPORTED
    has = f"{name} has compute capability {capability[0]}.{capability[1]} and {shared} bytes of shared memory"
    assert has in text and f"need 9.0 or newer and {NEEDED_BYTES}" in text and "B200" in text


@pytest.mark.parametrize(
    ("cuda_version", "package", "words"),
    [
        (
            12040,
            "550.54.15",
            "the NVIDIA driver 550.54.15 supports CUDA 12.4, the library needs CUDA 13.0: install driver 580",
        ),
        (12090, "", "the NVIDIA driver supports CUDA 12.9, the library needs CUDA 13.0: install driver 580"),
        (13000, "580.82", ""),
        (13010, "590.1", ""),
    ],
)
def test_a_driver_that_is_too_old_is_refused_with_its_version(cuda_version: int, package: str, words: str) -> None:
    require = declare("glint_testing_require_driver", c_int32, c_int32, c_int32, c_char_p)
    status = require(cuda_version, 13000, package.encode())
    assert status == (abi.STATUS_UNSUPPORTED if words else abi.STATUS_OK)
    if words:
        assert words in declare("glint_testing_choice_error", c_char_p)().decode()


def test_the_cpu_library_describes_the_cpu() -> None:
    library = load_library(choose_library("cpu"))
    device = describe_device(library)
    assert device.num_devices == 1 and device.name and device.kernels != AUTO
    assert 0 < device.memory_free <= device.memory_total
    assert (device.compute_major, device.driver_version, device.peers) == (0, 0, 0)
    with pytest.raises(InvalidArgument, match="device index is 1"):
        describe_device(library, 1)
    with pytest.raises(Unsupported, match="kernels 7 need instructions"):
        describe_device(library, kernels=PORTABLE)
    assert library.glint_describe_device(0, AUTO, None) == abi.STATUS_INVALID_ARGUMENT
    assert library.glint_describe_device(0, AUTO, abi.Device(struct_bytes=8)) == abi.STATUS_INVALID_ARGUMENT
