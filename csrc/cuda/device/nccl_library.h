#pragma once

#include <string>

#include <nccl.h>

#include "rounds/device.h"

namespace meshcast {

// The functions of the NCCL that this process has. It is loaded when first needed, not when the module is: the
// import works where there is none, and where torch brings one, that one is used.
class NcclLibrary {
 public:
  // Throws Error where there is no NCCL, or one that is older than kOldest; it says what to install.
  static const NcclLibrary& get();

  static constexpr int kOldest = 22000;  // 2.20.0, as NCCL itself counts

  int version() const { return version_; }

  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetUniqueId) get_unique_id = nullptr;
  decltype(&ncclGetErrorString) get_error_string = nullptr;
  decltype(&ncclGetLastError) get_last_error = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init_rank_config = nullptr;
  decltype(&ncclCommGetAsyncError) comm_get_async_error = nullptr;
  decltype(&ncclCommFinalize) comm_finalize = nullptr;
  decltype(&ncclCommDestroy) comm_destroy = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;

  // A result as the executor understands it. `comm` (may be null) is queried for details.
  GroupOutcome outcome(ncclResult_t result, ncclComm_t comm) const;

 private:
  NcclLibrary();

  int version_ = 0;
};

// 22809 -> "2.28.9"
std::string nccl_version_text(int version);

}  // namespace meshcast
