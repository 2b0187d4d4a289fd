"""Mirror of native/include/glint.h: constants, structs and function signatures.

Names are the header's without the `glint_` prefix: `glint_step_item` is `StepItem`, `GLINT_STATUS_OK` is `STATUS_OK`.
A struct whose first field is `struct_bytes` is made with `sized`, which fills it; the library refuses any other value.
Arrays are C-contiguous and belong to the side that made them. Counts say how many elements a pointer leads to; a
pointer may be NULL only where its count is 0, unless said otherwise.

`FUNCTIONS` gives the result type and the argument types of every function, by its name in the header.
"""

from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, sizeof
from typing import Any, TypeVar

ABI_VERSION = 10
MAX_LOGPROBS = 20
MAX_DRAFT_TOKENS = 8
MAX_STEPS_IN_FLIGHT = 2

STATUS_OK = 0
STATUS_INVALID_ARGUMENT = 1
STATUS_UNKNOWN_REQUEST = 2
STATUS_OUT_OF_PAGES = 3
STATUS_OUT_OF_MEMORY = 4
STATUS_FILE = 5
STATUS_BUSY = 6
STATUS_UNSUPPORTED = 7
STATUS_INTERNAL = 8
STATUS_RANK_FAILED = 9

DTYPE_F32 = 1
DTYPE_BF16 = 2
DTYPE_F8_E4M3 = 3

SCALE_NONE = 0
SCALE_CHANNEL = 1
SCALE_TENSOR = 2
SCALE_TILE = 3

KERNELS_AUTO = 0
KERNELS_EXACT = 1
KERNELS_PLAIN = 2
KERNELS_NEON = 3
KERNELS_AVX2 = 4
KERNELS_AVX512 = 5
KERNELS_AMX = 6
KERNELS_PORTABLE = 7
KERNELS_HOPPER = 8
KERNELS_AVX512_BF16 = 9
KERNELS_NEON_BF16 = 10

EXPERT_LAYOUT_TP = 0
EXPERT_LAYOUT_EP = 1

SEQUENCE_PARALLEL_AUTO = 0
SEQUENCE_PARALLEL_OFF = 1
SEQUENCE_PARALLEL_ON = 2

ALL_REDUCE_AUTO = 0
ALL_REDUCE_NCCL = 1
ALL_REDUCE_CUSTOM = 2

ROLE_EMBEDDING = 1
ROLE_LM_HEAD = 2
ROLE_FINAL_NORM = 3
ROLE_INPUT_NORM = 4
ROLE_POST_ATTENTION_NORM = 5
ROLE_QUERY = 6
ROLE_KEY = 7
ROLE_VALUE = 8
ROLE_OUTPUT = 9
ROLE_QUERY_NORM = 10
ROLE_KEY_NORM = 11
ROLE_GATE = 12
ROLE_UP = 13
ROLE_DOWN = 14
ROLE_ROUTER = 15
ROLE_SHARED_GATE = 16
ROLE_SHARED_UP = 17
ROLE_SHARED_DOWN = 18
ROLE_EMBEDDING_NORM = 19
ROLE_HIDDEN_NORM = 20
ROLE_EH_PROJ = 21

PART_WEIGHT = 0
PART_SCALE = 1
PART_BIAS = 2

FINISH_NONE = 0
FINISH_STOP = 1
FINISH_LENGTH = 2
FINISH_FAILED = 3

FAILURE_NONE = 0
FAILURE_NOT_FINITE = 1
FAILURE_NOTHING_ALLOWED = 2


class Engine(Structure):
    """An engine, opaque. Only ever held by pointer; made by `glint_init_engine`, ended by `glint_free_engine`."""


class Model(Structure):
    """The shape of the model. Sizes are counts of elements; flags are 0 or 1.

    Layers `0 .. num_dense_layers-1` have a dense MLP of `dense_width`, the others experts of `expert_width` and a
    shared expert of `shared_width`. `rotary_dim` leading dimensions of each head rotate. `weight_scale_kind` is one
    of `SCALE_*`; `SCALE_NONE` means a BF16 checkpoint. `input_group_size` is 0 where a row that an E4M3 weight is
    multiplied by has one scale, 128 where each group of 128 of its values has one; it goes with `SCALE_TILE`.
    The MTP layer drafts among the first `mtp_vocab_size` tokens on the CPU, among all `vocab_size` on GPUs.
    """

    _fields_ = [
        ("struct_bytes", c_uint32),
        ("vocab_size", c_int32),
        ("hidden_size", c_int32),
        ("num_layers", c_int32),
        ("num_dense_layers", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary_dim", c_int32),
        ("dense_width", c_int32),
        ("expert_width", c_int32),
        ("shared_width", c_int32),
        ("num_experts", c_int32),
        ("experts_per_token", c_int32),
        ("max_positions", c_int32),
        ("has_qk_norm", c_int32),
        ("has_attention_bias", c_int32),
        ("normalise_weights", c_int32),
        ("weight_scale_kind", c_int32),
        ("input_group_size", c_int32),
        ("mtp_vocab_size", c_int32),
        ("routed_scaling", c_float),
        ("norm_epsilon", c_double),
        ("rope_theta", c_double),
    ]


class File(Structure):
    """A checkpoint file to map. `path` is UTF-8 and ends in NUL; the file must have exactly `byte_count` bytes."""

    _fields_ = [("struct_bytes", c_uint32), ("reserved", c_int32), ("path", c_char_p), ("byte_count", c_uint64)]


class Tensor(Structure):
    """One tensor of the checkpoint: what it is (`ROLE_*`, `PART_*`, layer, expert) and where its bytes lie.

    Shape `[rows, cols]`, row major, starting at `file_offset` of file `file_index`. `layer` is -1 for tensors outside
    the layers, `expert` is -1 for tensors outside the routed experts.
    """

    _fields_ = [
        ("struct_bytes", c_uint32),
        ("role", c_int32),
        ("part", c_int32),
        ("layer", c_int32),
        ("expert", c_int32),
        ("dtype", c_int32),
        ("rows", c_int64),
        ("cols", c_int64),
        ("file_index", c_int32),
        ("reserved", c_int32),
        ("file_offset", c_uint64),
        ("byte_count", c_uint64),
    ]


class EngineOptions(Structure):
    """Everything that is fixed for the life of an engine. `files` has `file_count` elements; all is copied.

    `local_experts` is how many experts of each layer are held, 0 for all. `sequence_parallel` and `all_reduce` choose
    how several ranks share rows and sums, `kv_dtype` what keys and values are kept in (0: the backend's own); with
    `shares_devices` several ranks may run on one GPU. With `synthetic_seed` other than 0 the weights are random, made
    from it; there are no files and no tensors then, and `emulated_ranks` above 1 makes this one rank of as many, whose
    collectives are local copies. The CPU library takes none of these. `max_draft_tokens` above 0 loads the MTP layer,
    whose tensors have layer `num_layers`.
    """

    _fields_ = [
        ("struct_bytes", c_uint32),
        ("kernels", c_int32),
        ("num_threads", c_int32),
        ("num_ranks", c_int32),
        ("row_slices", c_int32),
        ("expert_layout", c_int32),
        ("page_tokens", c_int32),
        ("num_pages", c_int32),
        ("max_step_tokens", c_int32),
        ("max_step_items", c_int32),
        ("max_requests", c_int32),
        ("max_context_tokens", c_int32),
        ("file_count", c_int32),
        ("local_experts", c_int32),
        ("sequence_parallel", c_int32),
        ("all_reduce", c_int32),
        ("kv_dtype", c_int32),
        ("shares_devices", c_int32),
        ("emulated_ranks", c_int32),
        ("max_draft_tokens", c_int32),
        ("synthetic_seed", c_uint64),
        ("model", POINTER(Model)),
        ("files", POINTER(File)),
    ]


class Device(Structure):
    """A device that the library sees, and the kernels that it would run there.

    Versions are CUDA's: 13000 is 13.0. `shared_bytes` is the shared memory of a thread block. Bit i of `peers` says
    that the device reaches the memory of device i. `driver` is the version of the driver's package, empty where the
    machine does not tell. `kernels_reason`, `code` and `nccl` are sentences; on the CPU all but name, kernels and
    memory is empty. Texts end in NUL.
    """

    _fields_ = [
        ("struct_bytes", c_uint32),
        ("num_devices", c_int32),
        ("compute_major", c_int32),
        ("compute_minor", c_int32),
        ("driver_version", c_int32),
        ("runtime_version", c_int32),
        ("kernels", c_int32),
        ("num_multiprocessors", c_int32),
        ("shared_bytes", c_uint64),
        ("memory_total", c_uint64),
        ("memory_free", c_uint64),
        ("peers", c_uint64),
        ("name", c_char * 64),
        ("driver", c_char * 64),
        ("kernels_reason", c_char * 128),
        ("code", c_char * 128),
        ("nccl", c_char * 512),
    ]


class EnginePlan(Structure):
    """The bytes that an engine with given options would take, and the device it would run on.

    `weight_bytes`, `workspace_bytes` and `num_pages` times `bytes_per_page` lie in the device's memory, of which
    `memory_free` bytes of `memory_total` are free now; `pinned_bytes` lie in the machine's. `device_name` ends in NUL.
    """

    _fields_ = [
        ("struct_bytes", c_uint32),
        ("kernels", c_int32),
        ("device_name", c_char * 64),
        ("memory_total", c_uint64),
        ("memory_free", c_uint64),
        ("weight_bytes", c_uint64),
        ("workspace_bytes", c_uint64),
        ("pinned_bytes", c_uint64),
        ("bytes_per_page", c_uint64),
    ]


class LoadState(Structure):
    """How far the weights of the engine that is being made are read; `is_loading` is 0 or 1."""

    _fields_ = [
        ("struct_bytes", c_uint32),
        ("is_loading", c_int32),
        ("bytes_done", c_uint64),
        ("bytes_total", c_uint64),
    ]


class Sampling(Structure):
    """How a request's tokens are chosen.

    A token's random number depends on `seed`, `choice_index` and the token's position, on nothing else. Temperature 0
    is greedy. `top_k` 0, `top_p` 1, `min_p` 0, penalties 1, 0 and 0 change nothing. With `has_logprobs` each new token
    comes with its own log-probability and the `num_logprobs` best (0 to `MAX_LOGPROBS`); likewise for the prompt.
    `bias_tokens` and `bias_values` both have `bias_count` elements, added to the logits.
    """

    _fields_ = [
        ("struct_bytes", c_uint32),
        ("choice_index", c_uint32),
        ("seed", c_uint64),
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("frequency_penalty", c_float),
        ("presence_penalty", c_float),
        ("top_k", c_int32),
        ("has_logprobs", c_int32),
        ("num_logprobs", c_int32),
        ("has_prompt_logprobs", c_int32),
        ("num_prompt_logprobs", c_int32),
        ("bias_count", c_int32),
        ("bias_tokens", POINTER(c_int32)),
        ("bias_values", POINTER(c_float)),
    ]


class Request(Structure):
    """One completion. Everything is copied by `glint_add_request`.

    `prompt_tokens` has `prompt_count` elements, at least 1. `stop_tokens` has `stop_token_count` elements.
    `stop_sequence_tokens` is all stop sequences end to end; `stop_sequence_lengths` has `stop_sequence_count`
    elements. Requests share cached pages only with requests of the same `cache_salt`.
    """

    _fields_ = [
        ("struct_bytes", c_uint32),
        ("prompt_count", c_int32),
        ("prompt_tokens", POINTER(c_int32)),
        ("max_new_tokens", c_int32),
        ("stop_token_count", c_int32),
        ("stop_tokens", POINTER(c_int32)),
        ("stop_sequence_tokens", POINTER(c_int32)),
        ("stop_sequence_lengths", POINTER(c_int32)),
        ("stop_sequence_count", c_int32),
        ("reserved", c_int32),
        ("cache_salt", c_uint64),
        ("sampling", POINTER(Sampling)),
    ]


class StepItem(Structure):
    """By how many of its known but uncomputed tokens a request advances in a step.

    A request's first item begins after its cached prefix; `advance_tokens` counts from there and is cut to what is
    left. Drafts that the request's last step made follow its known tokens: what is advanced beyond those is verified.
    `draft_tokens` is how many drafts to make behind the sampled token, up to `max_draft_tokens` of the engine. Where
    the request makes or verifies drafts in a step in flight, that step decides where this one begins and what it
    verifies: one token, and of the drafts that are made there as many as `advance_tokens` goes beyond it. A successful
    submit fills `cached_tokens` and `first_position`, which is -1 where a step in flight decides it.
    """

    _fields_ = [
        ("request_id", c_uint64),
        ("advance_tokens", c_int32),
        ("draft_tokens", c_int32),
        ("first_position", c_int32),
        ("cached_tokens", c_int32),
    ]


class Ticket(Structure):
    """Names a submitted step. A submit short of pages sets `missing_pages` and changes nothing else."""

    _fields_ = [("struct_bytes", c_uint32), ("missing_pages", c_int32), ("step", c_uint64)]


class Mask(Structure):
    """Tokens allowed for one item of the step: bit `t % 32` of `words[t / 32]`, `word_count` words for all tokens.

    An item that verifies drafts has a mask for each `row`: 0 is for the token behind the known ones, 1 behind a draft.
    A mask without words says that the drafts from the one before its row on are not verified.
    """

    _fields_ = [
        ("item", c_int32),
        ("row", c_int32),
        ("word_count", c_int32),
        ("reserved", c_int32),
        ("words", POINTER(c_uint32)),
    ]


class Masks(Structure):
    """The masks of a step, `count` of them; rows without a mask may choose any token."""

    _fields_ = [("struct_bytes", c_uint32), ("count", c_int32), ("masks", POINTER(Mask))]


class Logprob(Structure):
    """Log-probability of `token` at absolute `position` of prompt and generated tokens.

    The entries of a position follow each other: the actual token first, then the best in descending order.
    """

    _fields_ = [("item", c_int32), ("position", c_int32), ("token", c_int32), ("logprob", c_float)]


class ItemResult(Structure):
    """The result of a step for one item: `token_count` new tokens, `FINISH_*`, `FAILURE_*` and the request's counts.

    The tokens of all items of a step lie in one array. `draft_count` drafts may be verified by the request's next step.
    The item began at `first_position` and verified `verified_count` drafts; up to `computed_tokens` what it computed
    stays, and a request that had ended before has none.
    """

    _fields_ = [
        ("request_id", c_uint64),
        ("token_count", c_int32),
        ("finish_reason", c_int32),
        ("failure", c_int32),
        ("cached_tokens", c_int32),
        ("computed_tokens", c_int32),
        ("draft_count", c_int32),
        ("first_position", c_int32),
        ("verified_count", c_int32),
        ("tokens", POINTER(c_int32)),
        ("drafts", POINTER(c_int32)),
    ]


class StepResults(Structure):
    """Results of a step: `item_count` items in the order of the submit, `logprob_count` log-probabilities.

    The pointers lead to memory of the engine and are valid until its next collect or its end.
    """

    _fields_ = [
        ("struct_bytes", c_uint32),
        ("item_count", c_int32),
        ("items", POINTER(ItemResult)),
        ("logprobs", POINTER(Logprob)),
        ("logprob_count", c_int32),
        ("pages_free", c_int32),
        ("pages_held", c_int32),
        ("pages_cached", c_int32),
    ]


class EngineStats(Structure):
    """Counters. `pages_free + pages_held + pages_cached == num_pages`; `kernels` is the path really chosen.

    `weight_bytes_placed` were copied to the device. `experts_read` adds up, over steps and layers, how many different
    experts were needed, on all ranks. `steps_replayed` ran from a recording of the device's work. `collectives_run` and
    `collective_bytes` count the collectives of one rank.
    """

    _fields_ = [
        ("struct_bytes", c_uint32),
        ("num_pages", c_int32),
        ("pages_free", c_int32),
        ("pages_held", c_int32),
        ("pages_cached", c_int32),
        ("num_requests", c_int32),
        ("steps_in_flight", c_int32),
        ("kernels", c_int32),
        ("steps_done", c_uint64),
        ("tokens_computed", c_uint64),
        ("tokens_sampled", c_uint64),
        ("tokens_cached", c_uint64),
        ("weight_bytes_mapped", c_uint64),
        ("weight_bytes_copied", c_uint64),
        ("page_bytes", c_uint64),
        ("workspace_bytes", c_uint64),
        ("weight_bytes_placed", c_uint64),
        ("experts_read", c_uint64),
        ("steps_replayed", c_uint64),
        ("collectives_run", c_uint64),
        ("collective_bytes", c_uint64),
    ]


class Arithmetic(Structure):
    """What all threads reach together in the first cache.

    `multiply_adds_per_second` is a plain loop of the kernel set's own instruction. `fp8_weights_per_second` is the
    kernel set's product of E4M3 weights with one token.
    """

    _fields_ = [
        ("struct_bytes", c_uint32),
        ("reserved", c_uint32),
        ("multiply_adds_per_second", c_double),
        ("fp8_weights_per_second", c_double),
    ]


FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "glint_abi_version": (c_uint32, ()),
    "glint_backend_name": (c_char_p, ()),
    "glint_last_error": (c_char_p, ()),
    "glint_describe_device": (c_int32, (c_int32, c_int32, POINTER(Device))),
    "glint_plan_engine": (c_int32, (POINTER(EngineOptions), POINTER(EnginePlan))),
    "glint_load_progress": (c_int32, (POINTER(LoadState),)),
    "glint_init_engine": (
        c_int32,
        (POINTER(EngineOptions), POINTER(Tensor), c_int64, POINTER(POINTER(Engine))),
    ),
    "glint_free_engine": (c_int32, (POINTER(Engine),)),
    "glint_add_request": (c_int32, (POINTER(Engine), POINTER(Request), POINTER(c_uint64))),
    "glint_free_request": (c_int32, (POINTER(Engine), c_uint64)),
    "glint_release_pages": (c_int32, (POINTER(Engine), c_uint64)),
    "glint_limit_reuse": (c_int32, (POINTER(Engine), c_uint64, c_int32)),
    "glint_submit_step": (c_int32, (POINTER(Engine), POINTER(StepItem), c_int32, POINTER(Ticket))),
    "glint_sample_step": (c_int32, (POINTER(Engine), POINTER(Ticket), POINTER(Masks))),
    "glint_collect_step": (c_int32, (POINTER(Engine), POINTER(Ticket), POINTER(StepResults))),
    "glint_prefill": (c_int32, (POINTER(Engine), c_uint64, POINTER(StepResults))),
    "glint_decode_step": (c_int32, (POINTER(Engine), c_uint64, POINTER(StepResults))),
    "glint_stats": (c_int32, (POINTER(Engine), POINTER(EngineStats))),
    "glint_check": (c_int32, (POINTER(Engine),)),
    "glint_measure_read": (c_int32, (POINTER(Engine), c_uint64, POINTER(c_double))),
    "glint_measure_arithmetic": (c_int32, (POINTER(Engine), POINTER(Arithmetic))),
}
AnyStruct = TypeVar("AnyStruct", bound=Structure)


def sized(kind: type[AnyStruct], **fields: Any) -> AnyStruct:
    """Make a struct with `struct_bytes` and the given fields set; the others are 0 or NULL."""
    return kind(struct_bytes=sizeof(kind), **fields)
