#include "cuda/comm/nccl.h"

#include <dlfcn.h>

#include <cstdlib>
#include <vector>

#include "base/contract.h"

namespace glint::cuda {

namespace {

constexpr const char* kPathVariable = "GLINT_NCCL";
constexpr const char* kSystemName = "libnccl.so.2";

std::string version_name(int32_t version) {
  return text(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

std::vector<std::string> paths_to_try(const std::string& path) {
  if (!path.empty()) return {path};
  const char* variable = std::getenv(kPathVariable);
  if (variable != nullptr && *variable != '\0') return {variable};
  return {kSystemName};
}

struct OpenLibrary {
  void* library = nullptr;
  std::string path;
};

OpenLibrary open_library(const std::string& path) {
  std::string reasons;
  for (const std::string& place : paths_to_try(path)) {
    void* library = dlopen(place.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) return {library, place};
    const char* reason = dlerror();
    reasons += text(reasons.empty() ? "" : "; ", reason == nullptr ? place.c_str() : reason);
  }
  throw Failure(GLINT_STATUS_UNSUPPORTED,
                text("several ranks need NCCL, which could not be loaded (", reasons, "): install it (pip install ",
                     "nvidia-nccl-cu13, or your system's package libnccl2) or set ", kPathVariable,
                     " to the path of libnccl.so.2"));
}

template <typename Function>
void take(Function& function, void* library, const char* name, const std::string& path) {
  void* symbol = dlsym(library, name);
  require(symbol != nullptr, GLINT_STATUS_UNSUPPORTED, path, " has no ", name, ": it is no NCCL library; set ",
          kPathVariable, " to the path of libnccl.so.2");
  function = reinterpret_cast<Function>(symbol);
}

void set_unless_given(const char* name, const char* value) { setenv(name, value, 0); }

}

void prepare_nccl_environment(bool shares_devices) {
  set_unless_given("CUDA_MODULE_LOADING", "EAGER");
  set_unless_given("CUDA_DEVICE_MAX_CONNECTIONS", "32");
  set_unless_given("NCCL_GRAPH_REGISTER", "0");
  if (!shares_devices) return;
  set_unless_given("NCCL_MULTI_RANK_GPU_ENABLE", "1");
  set_unless_given("NCCL_MAX_CTAS", "1");
  set_unless_given("NCCL_RUNTIME_CONNECT", "0");
}

std::shared_ptr<const Nccl> Nccl::load(const std::string& path) {
  const OpenLibrary opened = open_library(path);
  std::shared_ptr<Nccl> nccl(new Nccl());
  nccl->path_ = opened.path;
  nccl->take_functions(opened.library);
  int32_t (*get_version)(int* version) = nullptr;
  take(get_version, opened.library, "ncclGetVersion", opened.path);
  nccl->check(get_version(&nccl->version_), "ncclGetVersion");
  require(nccl->version_ >= kNcclLeastVersion, GLINT_STATUS_UNSUPPORTED, opened.path, " is NCCL ", nccl->version_text(),
          ", too old: install ", version_name(kNcclLeastVersion), " or newer");
  return nccl;
}

void Nccl::take_functions(void* library) {
  take(get_unique_id, library, "ncclGetUniqueId", path_);
  take(init_rank, library, "ncclCommInitRank", path_);
  take(destroy, library, "ncclCommDestroy", path_);
  take(abort, library, "ncclCommAbort", path_);
  take(get_async_error, library, "ncclCommGetAsyncError", path_);
  take(error_string, library, "ncclGetErrorString", path_);
  take(last_error, library, "ncclGetLastError", path_);
  take(group_start, library, "ncclGroupStart", path_);
  take(group_end, library, "ncclGroupEnd", path_);
  take(all_gather, library, "ncclAllGather", path_);
  take(broadcast, library, "ncclBroadcast", path_);
  take(send, library, "ncclSend", path_);
  take(receive, library, "ncclRecv", path_);
}

std::string Nccl::version_text() const { return version_name(version_); }

void Nccl::require_shared_devices() const {
  require(version_ >= kNcclSharedDeviceVersion, GLINT_STATUS_UNSUPPORTED, path_, " is NCCL ", version_text(),
          ", which refuses two ranks on one GPU: give every rank a GPU of its own, or install ",
          version_name(kNcclSharedDeviceVersion), " or newer");
}

void Nccl::check(int32_t result, const char* call) const {
  if (result == kNcclSuccess) return;
  const char* detail = last_error(nullptr);
  throw Failure(GLINT_STATUS_RANK_FAILED,
                text(call, " of NCCL ", version_text(), " failed: ", error_string(result),
                     detail == nullptr || *detail == '\0' ? "" : ": ", detail == nullptr ? "" : detail));
}

}
