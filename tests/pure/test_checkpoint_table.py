"""The tensor table: every tensor consumed, skipped by name, or a problem; laid out as the C struct."""

import ctypes
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from glint.checkpoint.layout import Dtype, Part, Role
from glint.checkpoint.table import NATIVE_TENSOR, Checkpoint, inspect_checkpoint, open_checkpoint
from glint.errors import CheckpointError
from tests.pure.checkpoint_files import (
    SMALL,
    Spec,
    fp8_method,
    make_specs,
    quantization,
    small_folder,
    spec_bytes,
    write_folder,
    write_json,
    write_raw,
)

HEADER_TEXT = (Path(__file__).parents[2] / "native/include/glint.h").read_text()
STRATEGIES = [None, "channel", "tensor", "block"]
C_TYPES = {
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
}


def problems_of(folder: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(folder)
    return refusal.value.problems


def open_specs(folder: Path, document: dict[str, Any], specs: dict[str, Spec]) -> Checkpoint:
    return open_checkpoint(write_folder(folder, document, specs))


def quantised(strategy: str | None) -> dict[str, Any]:
    return SMALL if strategy is None else SMALL | {"quantization_config": quantization(strategy)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_shards", [None, 3])
def test_every_tensor_is_consumed_once(strategy: str | None, num_shards: int | None, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_folder(tmp_path, strategy, num_shards))
    specs = make_specs(quantised(strategy))
    assert len(checkpoint.tensors) == len(specs)
    assert not checkpoint.skipped and not checkpoint.notes
    assert sum(entry.byte_count for entry in checkpoint.tensors) == sum(map(spec_bytes, specs.values()))
    keys = [entry[:4] for entry in checkpoint.tensors]
    assert len(set(keys)) == len(keys)
    for entry in checkpoint.tensors:
        elements = entry.rows * entry.cols
        assert entry.byte_count == elements * {Dtype.F32: 4, Dtype.BF16: 2, Dtype.F8_E4M3: 1}[entry.dtype]


def test_offsets_point_at_the_bytes_that_the_official_loader_reads(tmp_path: Path) -> None:
    folder = small_folder(tmp_path, "channel", 2)
    for path in folder.glob("*.safetensors"):
        data = np.memmap(path, mode="r+")
        header_bytes = 8 + int(data[:8].view("<u8")[0])
        data[header_bytes:] = np.random.default_rng(1).integers(0, 100, len(data) - header_bytes, dtype=np.uint8)
        data.flush()
    checkpoint = open_checkpoint(folder)
    names = {
        (Role.ROUTER, Part.BIAS, 1, None): "model.layers.1.mlp.gate.e_score_correction_bias",
        (Role.DOWN, Part.SCALE, 2, 3): "model.layers.2.mlp.experts.3.down_proj.weight_scale",
        (Role.UP, Part.SCALE, 0, None): "model.layers.0.mlp.up_proj.weight_scale",
        (Role.SHARED_GATE, Part.SCALE, 1, None): "model.layers.1.mlp.shared_experts.gate_proj.weight_scale",
    }
    entries = {entry[:4]: entry for entry in checkpoint.tensors}
    for key, name in names.items():
        entry = entries[key]
        path = checkpoint.files[entry.file_index].path
        ours = np.fromfile(path, np.float32, entry.rows * entry.cols, offset=entry.file_offset)
        with safe_open(path, "np") as official:
            theirs = official.get_tensor(name)
        assert np.array_equal(ours, theirs.reshape(-1), equal_nan=True)


def test_roles_parts_and_types_are_numbered_as_in_the_c_header() -> None:
    for prefix, numbers in (("ROLE", Role), ("PART", Part), ("DTYPE", Dtype)):
        defined = {name: int(value) for name, value in re.findall(rf"#define GLINT_{prefix}_(\w+) (\d+)", HEADER_TEXT)}
        assert defined == {member.name: member.value for member in numbers}


def test_the_array_has_the_layout_of_the_c_struct(tmp_path: Path) -> None:
    body = re.search(r"typedef struct glint_tensor \{(.*?)\}", HEADER_TEXT, re.DOTALL)
    assert body is not None
    fields = [(name, C_TYPES[kind]) for kind, name in re.findall(r"(\w+) (\w+);", body[1])]
    struct = type("NativeTensor", (ctypes.Structure,), {"_fields_": fields})
    assert ctypes.sizeof(struct) == NATIVE_TENSOR.itemsize
    assert NATIVE_TENSOR.names == tuple(name for name, _ in fields)
    for name, _ in fields:
        assert getattr(struct, name).offset == NATIVE_TENSOR.fields[name][1]
        assert getattr(struct, name).size == NATIVE_TENSOR.fields[name][0].itemsize
    checkpoint = open_checkpoint(small_folder(tmp_path, "block"))
    array = checkpoint.tensor_array()
    assert array.flags.c_contiguous and len(array) == len(checkpoint.tensors)
    native = (struct * len(array)).from_buffer(array)
    for entry, row in zip(checkpoint.tensors, native, strict=True):
        assert row.struct_bytes == ctypes.sizeof(struct) and row.reserved == 0
        assert (row.role, row.part, row.dtype) == (entry.role, entry.part, entry.dtype)
        assert row.layer == (-1 if entry.layer is None else entry.layer)
        assert row.expert == (-1 if entry.expert is None else entry.expert)
        assert (row.rows, row.cols, row.file_index) == (entry.rows, entry.cols, entry.file_index)
        assert (row.file_offset, row.byte_count) == (entry.file_offset, entry.byte_count)


def test_each_role_occurs_as_often_as_the_config_says(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_folder(tmp_path, "channel"))
    weights = Counter(entry.role for entry in checkpoint.tensors if entry.part is Part.WEIGHT)
    layers, moe_layers, experts = 3, 2, 4
    assert weights[Role.QUERY] == weights[Role.INPUT_NORM] == weights[Role.KEY_NORM] == layers
    assert weights[Role.GATE] == weights[Role.UP] == weights[Role.DOWN] == 1 + moe_layers * experts
    assert weights[Role.ROUTER] == weights[Role.SHARED_DOWN] == moe_layers
    assert weights[Role.EMBEDDING] == weights[Role.LM_HEAD] == weights[Role.FINAL_NORM] == 1
    biases = Counter(entry.role for entry in checkpoint.tensors if entry.part is Part.BIAS)
    assert biases == {Role.QUERY: layers, Role.KEY: layers, Role.VALUE: layers, Role.ROUTER: moe_layers}


def test_air_has_neither_norms_on_the_heads_nor_need_of_them(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(small_folder(tmp_path, use_qk_norm=False, attention_bias=False))
    roles = {entry.role for entry in checkpoint.tensors}
    assert not roles & {Role.QUERY_NORM, Role.KEY_NORM}
    write_json(tmp_path / "config.json", SMALL)
    assert any("q_norm.weight is missing" in problem for problem in problems_of(tmp_path))


def test_an_mtp_layer_is_read_when_announced_and_may_be_absent(tmp_path: Path) -> None:
    assert SMALL["num_nextn_predict_layers"] == 1
    absent = open_specs(tmp_path / "absent", SMALL, make_specs(SMALL))
    present = open_specs(tmp_path / "present", SMALL, make_specs(SMALL, has_mtp=True))
    assert [entry[:7] for entry in absent.tensors] == [entry[:7] for entry in present.tensors]
    assert not absent.skipped and not present.skipped and not absent.mtp_tensors
    extra = make_specs(SMALL, has_mtp=True).keys() - make_specs(SMALL).keys()
    assert len(present.mtp_tensors) == len(extra) and {entry.layer for entry in present.mtp_tensors} == {3}
    assert len(present.tensor_array()) == len(present.tensors)
    assert len(present.tensor_array(has_mtp=True)) == len(present.tensors) + len(extra)
    silent = SMALL | {"num_nextn_predict_layers": 0}
    problems = problems_of(write_folder(tmp_path / "silent", silent, make_specs(SMALL, has_mtp=True)))
    assert {problem.split(" is unexpected")[0] for problem in problems} == extra


def test_copies_of_embedding_and_head_in_the_mtp_layer_are_optional_and_all_else_is_not(tmp_path: Path) -> None:
    specs = make_specs(SMALL, has_mtp=True)
    copies = {f"model.layers.3.{name}.weight" for name in ("embed_tokens", "shared_head.head")}
    bare = open_specs(tmp_path / "bare", SMALL, {name: spec for name, spec in specs.items() if name not in copies})
    assert not {Role.EMBEDDING, Role.LM_HEAD} & {entry.role for entry in bare.mtp_tensors}
    missing = "model.layers.3.hnorm.weight"
    torn = open_specs(tmp_path / "torn", SMALL, {name: spec for name, spec in specs.items() if name != missing})
    assert not torn.mtp_tensors and len(torn.skipped) == len(specs) - len(make_specs(SMALL)) - 1
    notes = inspect_checkpoint(tmp_path / "torn").notes
    assert any(f"the MTP layer is left out, so nothing is drafted: {missing} is missing" in note for note in notes)


def test_the_head_of_the_mtp_layer_may_be_quantised_with_its_scale(tmp_path: Path) -> None:
    document = SMALL | {"quantization_config": quantization("channel")}
    specs = make_specs(document, has_mtp=True)
    head = "model.layers.3.shared_head.head"
    plain = open_specs(tmp_path / "plain", document, specs)
    assert [entry.dtype for entry in plain.mtp_tensors if entry.role is Role.LM_HEAD] == [Dtype.BF16]
    vocab, hidden = document["vocab_size"], document["hidden_size"]
    quantised = specs | {f"{head}.weight": ("F8_E4M3", (vocab, hidden))}
    assert not open_specs(tmp_path / "unscaled", document, quantised).mtp_tensors
    scaled = quantised | {f"{head}.weight_scale": ("F32", (vocab, 1))}
    found = open_specs(tmp_path / "scaled", document, scaled)
    assert [entry.part for entry in found.mtp_tensors if entry.role is Role.LM_HEAD] == [Part.WEIGHT, Part.SCALE]


def test_many_problems_of_one_kind_are_counted_after_the_first_forty(tmp_path: Path) -> None:
    wider = SMALL | {"hidden_size": 256}
    problems = problems_of(write_folder(tmp_path, wider, make_specs(SMALL)))
    differing = sum(make_specs(wider)[name] != spec for name, spec in make_specs(SMALL).items())
    assert len(problems) == 41
    assert problems[-1] == f"and {differing - 40} more: tensors of another shape"


def test_tied_embeddings_serve_as_the_head(tmp_path: Path) -> None:
    tied = SMALL | {"tie_word_embeddings": True}
    checkpoint = open_specs(tmp_path / "tied", tied, make_specs(tied))
    head = [entry for entry in checkpoint.tensors if entry.role is Role.LM_HEAD]
    embedding = [entry for entry in checkpoint.tensors if entry.role is Role.EMBEDDING]
    assert [entry._replace(role=Role.EMBEDDING) for entry in head] == embedding
    both = open_specs(tmp_path / "both", tied, make_specs(SMALL))
    assert [tensor.name for tensor in both.skipped] == ["lm_head.weight"]
    assert "lm_head.weight is skipped" in both.notes[0]
    untied = write_folder(tmp_path / "untied", SMALL, make_specs(tied))
    assert any(problem.startswith("lm_head.weight is missing") for problem in problems_of(untied))


def test_kv_scales_are_skipped_and_other_tensors_are_unexpected(tmp_path: Path) -> None:
    scales = {"model.layers.0.self_attn.k_scale": ("F32", (1,)), "model.layers.1.self_attn.v_proj.v_scale": ("F32", ())}
    checkpoint = open_specs(tmp_path / "scales", SMALL, make_specs(SMALL) | scales)
    assert {tensor.name: tensor.reason for tensor in checkpoint.skipped} == dict.fromkeys(scales, "KV scale")
    for name in (
        "model.layers.0.self_attn.q_proj.input_scale",
        "visual.weight",
        "model.layers.7.input_layernorm.weight",
    ):
        folder = write_folder(tmp_path / "other", SMALL, make_specs(SMALL) | {name: ("F32", (1,))})
        (problem,) = problems_of(folder)
        assert problem.startswith(f"{name} is unexpected")


def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    specs = make_specs(SMALL)
    del specs["model.layers.1.mlp.experts.2.up_proj.weight"]
    (problem,) = problems_of(write_folder(tmp_path, SMALL, specs))
    assert problem.startswith("model.layers.1.mlp.experts.2.up_proj.weight is missing") and "[160, 192]" in problem


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_tensor_of_another_shape_is_named_with_both_shapes(strategy: str | None, tmp_path: Path) -> None:
    document = quantised(strategy)
    specs = make_specs(document)
    for name in ("model.embed_tokens", "model.layers.0.self_attn.o_proj", "model.layers.2.mlp.experts.1.down_proj"):
        dtype, (rows, cols) = specs[f"{name}.weight"]
        changed = specs | {f"{name}.weight": (dtype, (cols, rows))}
        (problem,) = problems_of(write_folder(tmp_path, document, changed))
        assert f"{name}.weight" in problem and f"[{cols}, {rows}]" in problem and f"[{rows}, {cols}]" in problem
    for name, (dtype, shape) in specs.items():
        if len(shape) == 1:
            changed = specs | {name: (dtype, (shape[0] + 1,))}
            assert name in problems_of(write_folder(tmp_path, document, changed))[0]


@pytest.mark.parametrize(
    ("strategy", "accepted", "refused"),
    [
        ("channel", [(320, 1), (320,)], [(1, 320), (1,), (320, 2), ()]),
        ("tensor", [(1,), ()], [(1, 1), (2,), (320, 1)]),
        ("block", [(3, 2)], [(2, 3), (6,), (3, 2, 1), (2, 1)]),
    ],
)
def test_scales_have_the_shape_of_their_kind(
    strategy: str, accepted: list[tuple[int, ...]], refused: list[tuple[int, ...]], tmp_path: Path
) -> None:
    document = quantised(strategy)
    specs = make_specs(document)
    name = "model.layers.0.mlp.gate_proj.weight_scale"
    for shape in accepted:
        for dtype in ("F32", "BF16"):
            open_specs(tmp_path, document, specs | {name: (dtype, shape)})
    for shape in refused:
        (problem,) = problems_of(write_folder(tmp_path, document, specs | {name: ("F32", shape)}))
        assert name in problem and str(list(shape)) in problem


def test_the_fp8_method_names_its_scales_differently(tmp_path: Path) -> None:
    document = SMALL | {"quantization_config": fp8_method()}
    specs = make_specs(document)
    assert "model.layers.0.mlp.gate_proj.weight_scale_inv" in specs
    assert len(open_specs(tmp_path, document, specs).tensors) == len(specs)


@pytest.mark.parametrize(
    ("strategy", "name", "dtype"),
    [
        (None, "model.layers.0.self_attn.q_proj.weight", "F8_E4M3"),
        (None, "model.layers.0.self_attn.q_proj.weight", "F32"),
        (None, "model.layers.0.self_attn.q_proj.weight", "F16"),
        ("channel", "model.layers.0.self_attn.q_proj.weight", "BF16"),
        ("channel", "model.layers.1.mlp.experts.0.up_proj.weight", "U8"),
        ("channel", "model.layers.0.self_attn.q_proj.weight_scale", "F16"),
        ("channel", "model.layers.1.mlp.gate.weight", "F8_E4M3"),
        ("channel", "lm_head.weight", "F32"),
    ],
)
def test_another_dtype_is_refused(strategy: str | None, name: str, dtype: str, tmp_path: Path) -> None:
    specs = make_specs(quantised(strategy))
    (problem,) = problems_of(write_folder(tmp_path, quantised(strategy), specs | {name: (dtype, specs[name][1])}))
    assert problem.startswith(f"{name} is {dtype}, the engine needs ")


def test_norms_may_be_f32_and_the_router_bias_bf16(tmp_path: Path) -> None:
    specs = make_specs(SMALL)
    for name, (_, shape) in list(specs.items()):
        if "norm" in name:
            specs[name] = ("F32", shape)
        elif "e_score" in name:
            specs[name] = ("BF16", shape)
    checkpoint = open_specs(tmp_path, SMALL, specs)
    dtypes = {entry.role: entry.dtype for entry in checkpoint.tensors if entry.cols == 1}
    assert dtypes[Role.FINAL_NORM] is Dtype.F32
    assert dtypes[Role.ROUTER] is Dtype.BF16


def test_tensors_off_their_alignment_are_noted(tmp_path: Path) -> None:
    folder = small_folder(tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    write_raw(path, data[8 : 8 + length] + b" ", len(data) - 8 - length)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.notes[0].startswith(f"{len(checkpoint.tensors)} tensors do not start at a multiple")


def test_stop_tokens_come_from_generation_config_first(tmp_path: Path) -> None:
    folder = small_folder(tmp_path)
    assert open_checkpoint(folder).eos_token_ids == (1, 2)
    write_json(folder / "generation_config.json", {"eos_token_id": [5]})
    assert open_checkpoint(folder).eos_token_ids == (5,)
    write_json(folder / "generation_config.json", {"eos_token_id": [96]})
    assert "outside of vocab_size 96" in problems_of(folder)[0]
    write_json(folder / "generation_config.json", {})
    write_json(folder / "config.json", SMALL | {"eos_token_id": None})
    assert "no eos_token_id is given" in open_checkpoint(folder).notes[0]


def test_a_folder_that_cannot_read_texts_is_noted(tmp_path: Path) -> None:
    folder = small_folder(tmp_path)
    assert open_checkpoint(folder).notes == ()
    write_json(folder / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    (folder / "chat_template.jinja").unlink()
    assert open_checkpoint(folder).notes == ()
    write_json(folder / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}})
    code, template = open_checkpoint(folder).notes
    assert code.startswith("tokenizer_config.json: auto_map asks to run code")
    assert template.startswith("chat_template.jinja is missing: conversations cannot be rendered")
    (folder / "tokenizer_config.json").write_text("{")
    assert open_checkpoint(folder).notes[0].startswith("tokenizer_config.json: NotJson")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    missing = "is missing: only token ids can be used; copy the model's own file"
    assert open_checkpoint(folder).notes[:2] == (f"tokenizer.json {missing}", f"tokenizer_config.json {missing}")


def test_generation_settings_that_are_not_used_are_noted(tmp_path: Path) -> None:
    folder = small_folder(tmp_path)
    options = {"max_length": 40, "num_beams": 4, "typical_p": None, "do_sample": True, "bos_token_id": 1}
    write_json(folder / "generation_config.json", options)
    assert open_checkpoint(folder).notes == (
        "generation_config.json: max_length is not used",
        "generation_config.json: num_beams is not used",
    )
