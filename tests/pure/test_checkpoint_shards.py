"""The index and the weight files of a model folder: everything in one place, once, and inside the folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from glint.checkpoint.table import inspect_checkpoint, open_checkpoint
from glint.errors import CheckpointError
from tests.pure.checkpoint_files import SMALL, make_specs, small_folder, write_json, write_shard

INDEX = "model.safetensors.index.json"
FIRST = "model-00001-of-00003.safetensors"
SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid folder of three shards."""
    return small_folder(tmp_path / "model", num_shards=3)


def read_index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())


def place(folder: Path, name: str, file_name: str) -> None:
    index = read_index(folder)
    index["weight_map"][name] = file_name
    write_json(folder / INDEX, index)


def problems_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(folder)
    assert inspect_checkpoint(folder).problems == refusal.value.problems
    return refusal.value.problems


def test_shards_and_a_single_file_give_the_same_tensors(folder: Path, tmp_path: Path) -> None:
    single = open_checkpoint(small_folder(tmp_path / "single"))
    sharded = open_checkpoint(folder)
    assert len(single.files) == 1 and len(sharded.files) == 3
    assert [entry[:7] for entry in single.tensors] == [entry[:7] for entry in sharded.tensors]
    assert [file.byte_count for file in sharded.files] == [file.path.stat().st_size for file in sharded.files]


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", "C:x", "x" * 256]
)
def test_a_file_name_that_is_a_path_is_refused(folder: Path, name: str) -> None:
    write_shard(folder.parent / "model.safetensors", {"model.norm.weight": ("BF16", (192,))})
    place(folder, "model.norm.weight", name)
    assert any(repr(name) in problem and "no plain file name" in problem for problem in problems_of(folder))


def test_weight_files_may_be_links_as_in_the_hugging_face_cache(folder: Path) -> None:
    stored = folder.parent / "blobs"
    stored.mkdir()
    (folder / FIRST).rename(stored / "0123abcd")
    (folder / FIRST).symlink_to(Path("../blobs/0123abcd"))
    assert len(open_checkpoint(folder).files) == 3
    (stored / "0123abcd").unlink()
    assert any(problem.startswith(f"{FIRST}: the file is missing") for problem in problems_of(folder))


def test_a_missing_file_is_one_problem(folder: Path) -> None:
    count = list(read_index(folder)["weight_map"].values()).count(FIRST)
    (folder / FIRST).unlink()
    (problem,) = problems_of(folder)
    assert FIRST in problem and f"{count} tensors" in problem


def test_a_broken_file_is_one_problem(folder: Path) -> None:
    with (folder / SECOND).open("ab") as file:
        file.write(b"x")
    (problem,) = problems_of(folder)
    assert problem.startswith(f"{SECOND}: MetadataIncompleteBuffer")


def test_a_tensor_that_is_not_where_the_index_places_it(folder: Path) -> None:
    place(folder, "model.embed_tokens.weight", SECOND)
    (problem,) = problems_of(folder)
    assert "model.embed_tokens.weight" in problem and SECOND in problem and "lies in another file" in problem


def test_a_tensor_that_only_the_index_knows(folder: Path) -> None:
    place(folder, "model.layers.0.extra.weight", SECOND)
    (problem,) = problems_of(folder)
    assert "model.layers.0.extra.weight" in problem and "in no file" in problem


def test_a_tensor_that_the_index_does_not_name(folder: Path) -> None:
    index = read_index(folder)
    del index["weight_map"]["model.norm.weight"]
    write_json(folder / INDEX, index)
    (problem,) = problems_of(folder)
    assert "model.norm.weight" in problem and "the index does not name it" in problem


def test_a_tensor_in_two_files(folder: Path) -> None:
    weight_map = read_index(folder)["weight_map"]
    specs = make_specs(SMALL)
    second = {name: specs[name] for name, file in weight_map.items() if file == SECOND}
    write_shard(folder / SECOND, second | {"model.embed_tokens.weight": specs["model.embed_tokens.weight"]})
    (problem,) = problems_of(folder)
    assert problem.startswith(f"model.embed_tokens.weight lies in {FIRST} and in {SECOND}")


def test_files_that_the_index_does_not_name_are_ignored_with_a_note(folder: Path, tmp_path: Path) -> None:
    (folder / "other.safetensors").write_bytes(b"not even a header")
    assert open_checkpoint(folder).notes == ("other.safetensors is ignored: the index does not name it",)
    single = small_folder(tmp_path / "single")
    write_shard(single / "consolidated.safetensors", {})
    assert open_checkpoint(single).notes == (f"consolidated.safetensors is ignored: there is no {INDEX}",)


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {}, "weight_map": {}}', "x"],
)
def test_a_malformed_index_is_refused(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    assert problems_of(folder)[0].startswith(INDEX)


def test_the_total_size_of_the_index_is_not_used(folder: Path) -> None:
    index = read_index(folder)
    for metadata in ({"total_size": -5}, {}, None):
        write_json(folder / INDEX, index | {"metadata": metadata})
        assert len(open_checkpoint(folder).tensors) == len(index["weight_map"])


def test_a_folder_without_weights_or_no_folder_at_all(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", SMALL)
    assert "neither" in problems_of(tmp_path)[0]
    assert "is not a folder" in problems_of(tmp_path / "absent")[0]
    assert "is not a folder" in problems_of(tmp_path / "config.json")[0]


def test_problems_of_config_generation_and_weights_come_together(folder: Path) -> None:
    write_json(folder / "config.json", SMALL | {"hidden_act": "gelu"})
    write_json(folder / "generation_config.json", {"top_p": 7})
    (folder / FIRST).write_bytes(b"")
    problems = problems_of(folder)
    assert [problem.split(":")[0] for problem in problems] == ["config.json", "generation_config.json", FIRST]
