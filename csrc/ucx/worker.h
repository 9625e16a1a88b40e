#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ucx/api.h"

namespace meshcast::ucx {

// So many bytes of a message are sent at once (eager), into a buffer of the receiver if it has not posted yet;
// the rest waits for it. The content of such buffers is bounded for each pair: a message takes these bytes of
// the sender's credit, and a small one counts as kLeastCredit. A sender without credit waits.
inline constexpr int64_t kEagerBytes = 512 * 1024;
inline constexpr int64_t kLeastCredit = 8 * 1024;
// Messages up to this size end once their memory may be used again; larger ones once their receiver has all of
// them.
inline constexpr int64_t kSmallBytes = 8 * 1024;
inline constexpr int64_t kCreditBytes = 1024 * 1024;
inline int64_t credit_of(int64_t nbytes) { return std::max(nbytes, kLeastCredit); }

// Larger messages travel in fragments: small enough to be in a core's caches while they are packed and put in
// place, large enough that the cost of each does not count (docs/decisions.md has the figures).
inline constexpr int64_t kFragmentBytes = 512 * 1024;

// Fragments of a process, for messages that have to be packed: 32 MiB. More peers than that have one each.
inline constexpr int kManyFragments = 64;

// The bytes that UCX reads from a connection at a time: a fragment and its headers. Its own 8 KiB make TCP four
// times slower.
inline constexpr int64_t kSegmentBytes = kFragmentBytes + 16 * 1024;

inline constexpr unsigned kFirstMessage = 7;  // the numbers of ours begin here; smaller ones are left to others

// A context and worker of UCX on one NIC, or on the NICs that UCX chooses. Not thread-safe: one lock guards all
// workers of a process.
class Worker {
 public:
  // device: as UCX names it, "" for its own choice. `settings` are UCX's, without "UCX_"; the environment takes
  // precedence, and settings that the library does not know are left out. Throws Error.
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
  std::string devices_;  // for messages
  std::string address_;
  int event_fd_ = -1;
};

}  // namespace meshcast::ucx
