#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "c10d/agreed_plan.h"
#include "c10d/agreement.h"
#include "c10d/refusals.h"
#include "c10d/reshard_work.h"
#include "c10d/watcher.h"
#include "common/error.h"
#include "common/forks.h"

namespace meshcast {

// What both cores of a private group share, that of its CPUs and that of its GPUs: who the group is, how it
// fails, and how a start takes its tensors. Thread-safe.
class GroupBase {
 public:
  virtual ~GroupBase() = default;
  GroupBase(const GroupBase&) = delete;
  GroupBase& operator=(const GroupBase&) = delete;

  void abort(const std::string& reason);       // ends all runs, here and on the other ranks; does not block
  std::optional<std::string> error() const;    // the first cause
  std::optional<RefusedCall> refused() const;  // where the first cause is that a rank refused a call
  void refuse_if_failed() const;               // throws AbortedError with the first cause

 protected:
  explicit GroupBase(GroupIdentity identity)
      : identity_(std::move(identity)), bin_(std::make_shared<RecycleBin>()) {}

  virtual std::exception_ptr failure() const = 0;  // of the group; null while it is whole

  Error start_error(ErrorKind kind, const std::string& text) const;
  std::exception_ptr shut_down_error() const;

  // Of the tensors of a start: those that it keeps alive, those of them that are its results, and what the
  // sources are made of, by problem.
  struct Taken {
    std::vector<at::Tensor> kept;
    std::vector<at::Tensor> outputs;
    std::vector<ElementType> types;
  };

  // Checks what does not depend on the device. Throws LayoutError.
  static Taken take(const PlanDirection& direction, const StartArgs& args);

  const Origin origin_;  // in a forked child nothing of the group may be touched
  const GroupIdentity identity_;
  const std::shared_ptr<RecycleBin> bin_;
  std::shared_ptr<Watcher> watcher_;  // made and stopped by the core, which it looks after
};

}  // namespace meshcast
