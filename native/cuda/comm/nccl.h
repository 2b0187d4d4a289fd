#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace glint::cuda {

struct NcclUniqueId {
  std::array<char, 128> bytes{};
};

enum class NcclType : int32_t { kBytes = 1 };

inline constexpr int32_t kNcclSuccess = 0;
inline constexpr int32_t kNcclLeastVersion = 21800;
inline constexpr int32_t kNcclSharedDeviceVersion = 23203;

using NcclComm = void*;

void prepare_nccl_environment(bool shares_devices);

class Nccl {
 public:
  static std::shared_ptr<const Nccl> load(const std::string& path);

  ~Nccl() = default;
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  int32_t version() const { return version_; }
  std::string version_text() const;
  const std::string& path() const { return path_; }
  void require_shared_devices() const;
  void check(int32_t result, const char* call) const;

  int32_t (*get_unique_id)(NcclUniqueId* id) = nullptr;
  int32_t (*init_rank)(NcclComm* comm, int num_ranks, NcclUniqueId id, int rank) = nullptr;
  int32_t (*destroy)(NcclComm comm) = nullptr;
  int32_t (*abort)(NcclComm comm) = nullptr;
  int32_t (*get_async_error)(NcclComm comm, int32_t* error) = nullptr;
  const char* (*error_string)(int32_t result) = nullptr;
  const char* (*last_error)(NcclComm comm) = nullptr;
  int32_t (*group_start)() = nullptr;
  int32_t (*group_end)() = nullptr;
  int32_t (*all_gather)(const void* in, void* out, size_t count, NcclType type, NcclComm comm,
                        cudaStream_t stream) = nullptr;
  int32_t (*broadcast)(const void* in, void* out, size_t count, NcclType type, int root, NcclComm comm,
                       cudaStream_t stream) = nullptr;
  int32_t (*send)(const void* in, size_t count, NcclType type, int peer, NcclComm comm, cudaStream_t stream) = nullptr;
  int32_t (*receive)(void* out, size_t count, NcclType type, int peer, NcclComm comm, cudaStream_t stream) = nullptr;

 private:
  Nccl() = default;
  void take_functions(void* library);

  std::string path_;
  int32_t version_ = 0;
};

}
