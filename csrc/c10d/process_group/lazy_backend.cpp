#include "c10d/process_group/lazy_backend.h"

#include <string>
#include <utility>

#include <fmt/format.h>

#include "common/error.h"

namespace meshcast {

c10::intrusive_ptr<c10d::Backend> LazyBackend::get(const char* op, const c10d::Backend& owner) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_) refuse(op, owner.getRank(), ended_);
    if (backend_) return backend_;
  }
  const auto fresh = side_.make(op);
  const char* ended = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (!backend_) {
      backend_ = fresh;
      // As torch does for the backends that it makes itself.
      backend_->setGroupUid(owner.getGroupUid());
      backend_->setGroupDesc(owner.getGroupDesc());
      if (const auto device = owner.getBoundDeviceId(); device && device->is_cuda())
        backend_->setBoundDeviceId(device);
      if (timeout_) backend_->setTimeout(*timeout_);
    }
    ended = ended_;
  }
  if (ended) {  // while it was being made: the thread that ended the group has not seen it
    fresh->abort();
    refuse(op, owner.getRank(), ended);
  }
  return fresh;
}

c10::intrusive_ptr<c10d::Backend> LazyBackend::made() const {
  const std::lock_guard lock(mutex_);
  return backend_;
}

void LazyBackend::set_timeout(std::chrono::milliseconds timeout) {
  c10::intrusive_ptr<c10d::Backend> backend;
  {
    const std::lock_guard lock(mutex_);
    timeout_ = timeout;
    backend = backend_;
  }
  if (backend) backend->setTimeout(timeout);
}

c10::intrusive_ptr<c10d::Backend> LazyBackend::end(const char* how) {
  const std::lock_guard lock(mutex_);
  ended_ = how;
  return backend_;
}

void LazyBackend::abort() {
  if (const auto backend = end("aborted")) backend->abort();
}

void LazyBackend::shutdown() {
  if (const auto backend = end("shut down")) backend->shutdown();
}

void LazyBackend::reconfigured() {
  if (const auto backend = end("reconfigured")) backend->abort();
}

void LazyBackend::refuse(const char* op, int rank, const char* how) const {
  ErrorContext context;
  context.rank = rank;
  context.op = op;
  throw Error(ErrorKind::Aborted,
              fmt::format("rank {} of the group: {}: the process group was {}; make a new one", rank, op, how),
              context);
}

}  // namespace meshcast
