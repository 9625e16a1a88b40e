#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ucx/api.h"

namespace meshcast::ucx {

// Sizes that both ends count on.
inline constexpr size_t kSegmentBytes = 1024 * 1024;  // UCX's 8 KiB make TCP four times slower
inline constexpr unsigned kDataMessage = 7;           // numbers of active messages
inline constexpr unsigned kCreditMessage = 8;
inline constexpr unsigned kLeaveMessage = 9;

// A context and worker of UCX on one NIC, or on the NICs that UCX chooses. Not thread-safe: one lock guards all
// workers of a process.
class Worker {
 public:
  // device: as UCX names it, "" for its own choice. `settings` are UCX's, without "UCX_"; what the environment
  // sets counts more, and what the library does not know is left out. Throws Error.
  Worker(const Api& api, const std::string& device, const std::map<std::string, std::string>& settings);
  ~Worker();  // all endpoints are closed before
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  const std::string& address() const { return address_; }
  int event_fd() const { return event_fd_; }

  void on_message(unsigned id, ucp_am_recv_callback_t callback, void* argument);

  // Throws Error where UCX finds no way to this address. `failed` is called at most once, from progress().
  ucp_ep_h connect(const std::string& address, ucp_err_handler_cb_t failed, void* argument);

  bool progress() { return api_.ucp_worker_progress(worker_) != 0; }

  // Makes event_fd() readable at the next event. False: there is one already, call progress() again.
  bool arm() { return api_.ucp_worker_arm(worker_) != UCS_ERR_BUSY; }

  void signal() { api_.ucp_worker_signal(worker_); }

  const Api& api() const { return api_; }
  ucp_worker_h handle() const { return worker_; }

 private:
  void check(ucs_status_t status, const char* what) const;

  const Api& api_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  std::string address_;
  int event_fd_ = -1;
};

}  // namespace meshcast::ucx
