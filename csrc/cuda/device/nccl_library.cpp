#include "cuda/device/nccl_library.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include "common/error.h"

namespace meshcast {
namespace {

constexpr const char* kName = "libnccl.so.2";

template <class Function>
void find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr)
    throw Error(
        ErrorKind::Generic,
        fmt::format("the NCCL of this process ({}) has no {}: install NCCL {} or newer, such as the wheel "
                    "nvidia-nccl-cu13 that belongs to torch",
                    kName, name, nccl_version_text(NcclLibrary::kOldest)));
}

}  // namespace

std::string nccl_version_text(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

NcclLibrary::NcclLibrary() {
  // A torch that brings NCCL has loaded it under this name; it is never unloaded.
  void* const library = dlopen(kName, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw Error(
        ErrorKind::Generic,
        fmt::format("no NCCL was found ({}): transfers on GPUs need it; install a torch that brings it, or "
                    "NCCL {} or newer where the loader finds it",
                    dlerror(), nccl_version_text(kOldest)));
  find(library, "ncclGetVersion", &get_version);
  if (get_version(&version_) != ncclSuccess || version_ < kOldest)
    throw Error(ErrorKind::Generic, fmt::format("NCCL {} is too old: install {} or newer",
                                                nccl_version_text(version_), nccl_version_text(kOldest)));
  find(library, "ncclGetUniqueId", &get_unique_id);
  find(library, "ncclGetErrorString", &get_error_string);
  find(library, "ncclGetLastError", &get_last_error);
  find(library, "ncclCommInitRankConfig", &comm_init_rank_config);
  find(library, "ncclCommGetAsyncError", &comm_get_async_error);
  find(library, "ncclCommFinalize", &comm_finalize);
  find(library, "ncclCommDestroy", &comm_destroy);
  find(library, "ncclCommAbort", &comm_abort);
  find(library, "ncclGroupStart", &group_start);
  find(library, "ncclGroupEnd", &group_end);
  find(library, "ncclSend", &send);
  find(library, "ncclRecv", &recv);
}

const NcclLibrary& NcclLibrary::get() {
  static const NcclLibrary library;  // a failure is not remembered: the next call looks again
  return library;
}

GroupOutcome NcclLibrary::outcome(ncclResult_t result, ncclComm_t comm) const {
  if (result == ncclSuccess) return {};
  if (result == ncclInProgress) return {GroupState::InProgress, false, {}};
  std::string text = get_error_string(result);
  const char* const more = comm != nullptr ? get_last_error(comm) : nullptr;
  if (more != nullptr && *more != '\0') text += fmt::format(" ({})", more);
  if (result == ncclRemoteError)
    text += "; another rank has exited or has given up: look at its output first";
  else
    text += "; NCCL_DEBUG=WARN shows more";
  return {GroupState::Failed, result == ncclRemoteError, std::move(text)};
}

}  // namespace meshcast
