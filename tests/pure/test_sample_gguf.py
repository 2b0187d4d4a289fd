"""The GGUF reader against the gguf package, and against broken files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glint.errors import CheckpointError
from glint.sample.gguf import GgufFile
from tests.pure.sample_source import sample_gguf

__all__ = ["sample_gguf"]

KINDS = ("F32", "Q4_1", "Q8_0")


def write_small(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Writes a small file of every encoding with the gguf package; gives the values that it dequantises to."""
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.text", "Ġé世")
    writer.add_uint32("a.count", 41)
    writer.add_float32("a.real", 1e-5)
    writer.add_bool("a.flag", True)
    writer.add_array("a.texts", ["x", "", "yy"])
    writer.add_array("a.numbers", [3, -1])
    expected = {}
    for name in KINDS:
        kind = gguf.GGMLQuantizationType[name]
        values = random.normal(size=(3, 2, 64)).astype(np.float32)
        raw = values if name == "F32" else quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        expected[name] = quants.dequantize(raw, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    write_small(path)
    return path.read_bytes()


def test_reads_what_the_gguf_package_wrote(tmp_path: Path) -> None:
    expected = write_small(tmp_path / "small.gguf")
    with GgufFile(tmp_path / "small.gguf") as file:
        assert file.text("a.text") == "Ġé世"
        assert file.integer("a.count") == 41
        assert file.real("a.real") == 1e-5
        assert file.metadata["a.flag"] is True
        assert file.texts("a.texts") == ["x", "", "yy"]
        assert file.integers("a.numbers") == [3, -1]
        for name in KINDS:
            assert file.tensors[name].shape == (3, 2, 64)
            np.testing.assert_array_equal(file.read(name), expected[name])
        assert file.bytes_read == file.tensor_bytes


@pytest.mark.slow
def test_the_sample_model_reads_as_with_the_gguf_package(sample_gguf: Path) -> None:
    reader = gguf.GGUFReader(sample_gguf)
    with GgufFile(sample_gguf) as file:
        assert set(file.tensors) == {tensor.name for tensor in reader.tensors}
        for tensor in reader.tensors:
            expected = quants.dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(file.read(tensor.name), expected)
        stored = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        assert set(file.metadata) == set(stored)
        for key, field in stored.items():
            assert file.metadata[key] == field.contents(), key


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda file: file.read("nothing"), "no tensor 'nothing'"),
        (lambda file: file.text("nothing"), "no metadata 'nothing'"),
        (lambda file: file.text("a.count"), "a.count is 41"),
        (lambda file: file.integer("a.flag"), "a.flag is True"),
        (lambda file: file.real("a.count"), "a.count is 41"),
        (lambda file: file.texts("a.numbers"), "a.numbers is not a list of strings"),
        (lambda file: file.integers("a.texts"), "a.texts is not a list of integers"),
    ],
)
def test_asking_for_what_is_not_there_names_it(small: bytes, tmp_path: Path, call: Any, said: str) -> None:
    (tmp_path / "file").write_bytes(small)
    with GgufFile(tmp_path / "file") as file, pytest.raises(CheckpointError, match=said):
        call(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: b"", "cannot be mapped"),
        (lambda raw: b"GGUX" + raw[4:], "not with b'GGUF'"),
        (lambda raw: raw[:4] + b"\x02" + raw[5:], "version 2"),
        (lambda raw: raw[:-32], "lies at bytes"),
        (lambda raw: raw.replace(b"a.count", b"a.texts", 1), "'a.texts' twice"),
        (lambda raw: raw.replace(b"Q8_0", b"Q4_1", 1), "tensor 'Q4_1' twice"),
        (lambda raw: raw.replace(b"a.flag\x07\0\0\0\x01", b"a.flag\x07\0\0\0\x05"), "boolean 5"),
        (lambda raw: raw.replace(b"a.flag\x07\0\0\0", b"a.flag\x63\0\0\0"), "unknown value type 99"),
        (lambda raw: raw.replace(b"\x03\0\0\0\x40\0\0\0\0\0\0\0", b"\x09\0\0\0\x40\0\0\0\0\0\0\0"), "9 dimensions"),
        (lambda raw: raw.replace(b"\x03\0\0\0\x40\0\0\0\0\0\0\0", b"\x03\0\0\0\x41\0\0\0\0\0\0\0"), "cannot hold"),
        (lambda raw: raw.replace("Ġ".encode(), b"\xff\xff", 1), "not UTF-8"),
    ],
)
def test_broken_files_are_named(small: bytes, tmp_path: Path, change: Any, said: str) -> None:
    broken = change(small)
    assert broken != small
    (tmp_path / "broken.gguf").write_bytes(broken)
    with pytest.raises(CheckpointError, match=said) as caught:
        GgufFile(tmp_path / "broken.gguf")
    assert "broken.gguf" in str(caught.value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_read_or_refused(small: bytes, tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(small[: data.draw(st.integers(0, len(small)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, min(len(damaged), 900) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged"
    path.write_bytes(damaged)
    try:
        with GgufFile(path) as file:
            for name, tensor in file.tensors.items():
                with np.errstate(all="ignore"):
                    assert file.read(name).shape == tensor.shape
    except CheckpointError as error:
        assert str(path) in str(error)
