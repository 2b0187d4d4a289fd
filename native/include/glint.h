#ifndef GLINT_H
#define GLINT_H

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#define GLINT_API __attribute__((visibility("default")))

#define GLINT_ABI_VERSION 10
#define GLINT_MAX_LOGPROBS 20
#define GLINT_MAX_DRAFT_TOKENS 8
#define GLINT_MAX_STEPS_IN_FLIGHT 2

typedef int32_t glint_status;

#define GLINT_STATUS_OK 0
#define GLINT_STATUS_INVALID_ARGUMENT 1
#define GLINT_STATUS_UNKNOWN_REQUEST 2
#define GLINT_STATUS_OUT_OF_PAGES 3
#define GLINT_STATUS_OUT_OF_MEMORY 4
#define GLINT_STATUS_FILE 5
#define GLINT_STATUS_BUSY 6
#define GLINT_STATUS_UNSUPPORTED 7
#define GLINT_STATUS_INTERNAL 8
#define GLINT_STATUS_RANK_FAILED 9

#define GLINT_DTYPE_F32 1
#define GLINT_DTYPE_BF16 2
#define GLINT_DTYPE_F8_E4M3 3

#define GLINT_SCALE_NONE 0
#define GLINT_SCALE_CHANNEL 1
#define GLINT_SCALE_TENSOR 2
#define GLINT_SCALE_TILE 3

#define GLINT_KERNELS_AUTO 0
#define GLINT_KERNELS_EXACT 1
#define GLINT_KERNELS_PLAIN 2
#define GLINT_KERNELS_NEON 3
#define GLINT_KERNELS_AVX2 4
#define GLINT_KERNELS_AVX512 5
#define GLINT_KERNELS_AMX 6
#define GLINT_KERNELS_PORTABLE 7
#define GLINT_KERNELS_HOPPER 8
#define GLINT_KERNELS_AVX512_BF16 9
#define GLINT_KERNELS_NEON_BF16 10

#define GLINT_EXPERT_LAYOUT_TP 0
#define GLINT_EXPERT_LAYOUT_EP 1

#define GLINT_SEQUENCE_PARALLEL_AUTO 0
#define GLINT_SEQUENCE_PARALLEL_OFF 1
#define GLINT_SEQUENCE_PARALLEL_ON 2

#define GLINT_ALL_REDUCE_AUTO 0
#define GLINT_ALL_REDUCE_NCCL 1
#define GLINT_ALL_REDUCE_CUSTOM 2

#define GLINT_ROLE_EMBEDDING 1
#define GLINT_ROLE_LM_HEAD 2
#define GLINT_ROLE_FINAL_NORM 3
#define GLINT_ROLE_INPUT_NORM 4
#define GLINT_ROLE_POST_ATTENTION_NORM 5
#define GLINT_ROLE_QUERY 6
#define GLINT_ROLE_KEY 7
#define GLINT_ROLE_VALUE 8
#define GLINT_ROLE_OUTPUT 9
#define GLINT_ROLE_QUERY_NORM 10
#define GLINT_ROLE_KEY_NORM 11
#define GLINT_ROLE_GATE 12
#define GLINT_ROLE_UP 13
#define GLINT_ROLE_DOWN 14
#define GLINT_ROLE_ROUTER 15
#define GLINT_ROLE_SHARED_GATE 16
#define GLINT_ROLE_SHARED_UP 17
#define GLINT_ROLE_SHARED_DOWN 18
#define GLINT_ROLE_EMBEDDING_NORM 19
#define GLINT_ROLE_HIDDEN_NORM 20
#define GLINT_ROLE_EH_PROJ 21

#define GLINT_PART_WEIGHT 0
#define GLINT_PART_SCALE 1
#define GLINT_PART_BIAS 2

#define GLINT_FINISH_NONE 0
#define GLINT_FINISH_STOP 1
#define GLINT_FINISH_LENGTH 2
#define GLINT_FINISH_FAILED 3

#define GLINT_FAILURE_NONE 0
#define GLINT_FAILURE_NOT_FINITE 1
#define GLINT_FAILURE_NOTHING_ALLOWED 2

typedef struct glint_engine glint_engine;

typedef struct glint_model {
  uint32_t struct_bytes;
  int32_t vocab_size;
  int32_t hidden_size;
  int32_t num_layers;
  int32_t num_dense_layers;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t rotary_dim;
  int32_t dense_width;
  int32_t expert_width;
  int32_t shared_width;
  int32_t num_experts;
  int32_t experts_per_token;
  int32_t max_positions;
  int32_t has_qk_norm;
  int32_t has_attention_bias;
  int32_t normalise_weights;
  int32_t weight_scale_kind;
  int32_t input_group_size;
  int32_t mtp_vocab_size;
  float routed_scaling;
  double norm_epsilon;
  double rope_theta;
} glint_model;

typedef struct glint_file {
  uint32_t struct_bytes;
  int32_t reserved;
  const char* path;
  uint64_t byte_count;
} glint_file;

typedef struct glint_tensor {
  uint32_t struct_bytes;
  int32_t role;
  int32_t part;
  int32_t layer;
  int32_t expert;
  int32_t dtype;
  int64_t rows;
  int64_t cols;
  int32_t file_index;
  int32_t reserved;
  uint64_t file_offset;
  uint64_t byte_count;
} glint_tensor;

typedef struct glint_engine_options {
  uint32_t struct_bytes;
  int32_t kernels;
  int32_t num_threads;
  int32_t num_ranks;
  int32_t row_slices;
  int32_t expert_layout;
  int32_t page_tokens;
  int32_t num_pages;
  int32_t max_step_tokens;
  int32_t max_step_items;
  int32_t max_requests;
  int32_t max_context_tokens;
  int32_t file_count;
  int32_t local_experts;
  int32_t sequence_parallel;
  int32_t all_reduce;
  int32_t kv_dtype;
  int32_t shares_devices;
  int32_t emulated_ranks;
  int32_t max_draft_tokens;
  uint64_t synthetic_seed;
  const glint_model* model;
  const glint_file* files;
} glint_engine_options;

typedef struct glint_engine_plan {
  uint32_t struct_bytes;
  int32_t kernels;
  char device_name[64];
  uint64_t memory_total;
  uint64_t memory_free;
  uint64_t weight_bytes;
  uint64_t workspace_bytes;
  uint64_t pinned_bytes;
  uint64_t bytes_per_page;
} glint_engine_plan;

typedef struct glint_device {
  uint32_t struct_bytes;
  int32_t num_devices;
  int32_t compute_major;
  int32_t compute_minor;
  int32_t driver_version;
  int32_t runtime_version;
  int32_t kernels;
  int32_t num_multiprocessors;
  uint64_t shared_bytes;
  uint64_t memory_total;
  uint64_t memory_free;
  uint64_t peers;
  char name[64];
  char driver[64];
  char kernels_reason[128];
  char code[128];
  char nccl[512];
} glint_device;

typedef struct glint_load_state {
  uint32_t struct_bytes;
  int32_t is_loading;
  uint64_t bytes_done;
  uint64_t bytes_total;
} glint_load_state;

typedef struct glint_sampling {
  uint32_t struct_bytes;
  uint32_t choice_index;
  uint64_t seed;
  float temperature;
  float top_p;
  float min_p;
  float repetition_penalty;
  float frequency_penalty;
  float presence_penalty;
  int32_t top_k;
  int32_t has_logprobs;
  int32_t num_logprobs;
  int32_t has_prompt_logprobs;
  int32_t num_prompt_logprobs;
  int32_t bias_count;
  const int32_t* bias_tokens;
  const float* bias_values;
} glint_sampling;

typedef struct glint_request {
  uint32_t struct_bytes;
  int32_t prompt_count;
  const int32_t* prompt_tokens;
  int32_t max_new_tokens;
  int32_t stop_token_count;
  const int32_t* stop_tokens;
  const int32_t* stop_sequence_tokens;
  const int32_t* stop_sequence_lengths;
  int32_t stop_sequence_count;
  int32_t reserved;
  uint64_t cache_salt;
  const glint_sampling* sampling;
} glint_request;

typedef struct glint_step_item {
  uint64_t request_id;
  int32_t advance_tokens;
  int32_t draft_tokens;
  int32_t first_position;
  int32_t cached_tokens;
} glint_step_item;

typedef struct glint_ticket {
  uint32_t struct_bytes;
  int32_t missing_pages;
  uint64_t step;
} glint_ticket;

typedef struct glint_mask {
  int32_t item;
  int32_t row;
  int32_t word_count;
  int32_t reserved;
  const uint32_t* words;
} glint_mask;

typedef struct glint_masks {
  uint32_t struct_bytes;
  int32_t count;
  const glint_mask* masks;
} glint_masks;

typedef struct glint_logprob {
  int32_t item;
  int32_t position;
  int32_t token;
  float logprob;
} glint_logprob;

typedef struct glint_item_result {
  uint64_t request_id;
  int32_t token_count;
  int32_t finish_reason;
  int32_t failure;
  int32_t cached_tokens;
  int32_t computed_tokens;
  int32_t draft_count;
  int32_t first_position;
  int32_t verified_count;
  const int32_t* tokens;
  const int32_t* drafts;
} glint_item_result;

typedef struct glint_step_results {
  uint32_t struct_bytes;
  int32_t item_count;
  const glint_item_result* items;
  const glint_logprob* logprobs;
  int32_t logprob_count;
  int32_t pages_free;
  int32_t pages_held;
  int32_t pages_cached;
} glint_step_results;

typedef struct glint_engine_stats {
  uint32_t struct_bytes;
  int32_t num_pages;
  int32_t pages_free;
  int32_t pages_held;
  int32_t pages_cached;
  int32_t num_requests;
  int32_t steps_in_flight;
  int32_t kernels;
  uint64_t steps_done;
  uint64_t tokens_computed;
  uint64_t tokens_sampled;
  uint64_t tokens_cached;
  uint64_t weight_bytes_mapped;
  uint64_t weight_bytes_copied;
  uint64_t page_bytes;
  uint64_t workspace_bytes;
  uint64_t weight_bytes_placed;
  uint64_t experts_read;
  uint64_t steps_replayed;
  uint64_t collectives_run;
  uint64_t collective_bytes;
} glint_engine_stats;

typedef struct glint_arithmetic {
  uint32_t struct_bytes;
  uint32_t reserved;
  double multiply_adds_per_second;
  double fp8_weights_per_second;
} glint_arithmetic;

GLINT_API uint32_t glint_abi_version(void);
GLINT_API const char* glint_backend_name(void);
GLINT_API const char* glint_last_error(void);
GLINT_API glint_status glint_describe_device(int32_t index, int32_t kernels, glint_device* device);
GLINT_API glint_status glint_plan_engine(const glint_engine_options* options, glint_engine_plan* plan);
GLINT_API glint_status glint_load_progress(glint_load_state* state);
GLINT_API glint_status glint_init_engine(const glint_engine_options* options, const glint_tensor* tensors,
                                         int64_t count, glint_engine** engine);
GLINT_API glint_status glint_free_engine(glint_engine* engine);
GLINT_API glint_status glint_add_request(glint_engine* engine, const glint_request* request, uint64_t* id);
GLINT_API glint_status glint_free_request(glint_engine* engine, uint64_t id);
GLINT_API glint_status glint_release_pages(glint_engine* engine, uint64_t id);
GLINT_API glint_status glint_limit_reuse(glint_engine* engine, uint64_t id, int32_t reusable_tokens);
GLINT_API glint_status glint_submit_step(glint_engine* engine, glint_step_item* items, int32_t count,
                                         glint_ticket* ticket);
GLINT_API glint_status glint_sample_step(glint_engine* engine, const glint_ticket* ticket, const glint_masks* masks);
GLINT_API glint_status glint_collect_step(glint_engine* engine, const glint_ticket* ticket,
                                          glint_step_results* results);
GLINT_API glint_status glint_prefill(glint_engine* engine, uint64_t id, glint_step_results* results);
GLINT_API glint_status glint_decode_step(glint_engine* engine, uint64_t id, glint_step_results* results);
GLINT_API glint_status glint_stats(glint_engine* engine, glint_engine_stats* stats);
GLINT_API glint_status glint_check(glint_engine* engine);
GLINT_API glint_status glint_measure_read(glint_engine* engine, uint64_t byte_count, double* bytes_per_second);
GLINT_API glint_status glint_measure_arithmetic(glint_engine* engine, glint_arithmetic* arithmetic);

#if defined(__cplusplus)
}
#endif

#endif
