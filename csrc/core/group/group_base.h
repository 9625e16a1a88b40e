#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/forks.h"
#include "group/agreed_plan.h"
#include "group/agreement.h"
#include "group/refusals.h"
#include "group/watcher.h"

namespace meshcast {

class Executor;

// The threads in which the commands of all groups of this process run.
std::shared_ptr<Executor> control_executor();

// The base of both cores of a private group, for CPUs and for GPUs: its identity, and how it fails.
// Thread-safe.
class GroupBase {
 public:
  virtual ~GroupBase() = default;
  GroupBase(const GroupBase&) = delete;
  GroupBase& operator=(const GroupBase&) = delete;

  void abort(const std::string& reason);       // ends all runs, here and on the other ranks; does not block
  std::optional<std::string> error() const;    // the first cause
  std::optional<RefusedCall> refused() const;  // if the first cause is that a rank refused a call
  void refuse_if_failed() const;               // throws AbortedError with the first cause

  int32_t rank() const { return identity_.rank; }

 protected:
  explicit GroupBase(GroupIdentity identity) : identity_(std::move(identity)) {}

  virtual std::exception_ptr failure() const = 0;  // of the group; null while it is whole

  Error start_error(ErrorKind kind, const std::string& text) const;
  std::exception_ptr shut_down_error() const;

  const Origin origin_;  // in a forked child nothing of the group may be touched
  const GroupIdentity identity_;
  std::shared_ptr<Watcher> watcher_;  // made and stopped by the core, which it looks after
};

}  // namespace meshcast
