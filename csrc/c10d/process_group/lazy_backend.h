#pragma once

#include <functional>
#include <mutex>
#include <optional>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace meshcast {

// The backend for tensors on GPUs. Functions of Python's, so that nothing here needs CUDA or its headers.
struct GpuBackendMaker {
  // Makes the backend, or returns the one that was made before; `op` names the call that needs it. Throws a
  // typed error where there can be none.
  std::function<c10::intrusive_ptr<c10d::Backend>(const char* op)> make;
  // True if this process has a GPU and NCCL at all, that is if make() can succeed.
  std::function<bool()> possible;
};

// A backend that is made when a call first needs it. Earlier settings (its limit, its end) hold for it from the
// start. Any thread.
class LazyBackend {
 public:
  explicit LazyBackend(GpuBackendMaker side) : side_(std::move(side)) {}

  // Makes the backend unless it is there, as one of `owner`: with its name and bound device. Throws what
  // make() throws, every time, and Aborted after the end.
  c10::intrusive_ptr<c10d::Backend> get(const char* op, const c10d::Backend& owner);

  c10::intrusive_ptr<c10d::Backend> made() const;  // null until then
  bool possible() const { return side_.possible && side_.possible(); }

  void set_timeout(std::chrono::milliseconds timeout);
  void abort();
  void shutdown();
  // The group has other members now, which this kind of backend cannot take in.
  void reconfigured();

 private:
  // How the group was ended, if it was: the later one wins, they differ only in the text.
  c10::intrusive_ptr<c10d::Backend> end(const char* how);
  [[noreturn]] void refuse(const char* op, int rank, const char* how) const;

  const GpuBackendMaker side_;
  // Never held while make() runs: that takes Python's lock, whose holder may ask made().
  mutable std::mutex mutex_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  std::optional<std::chrono::milliseconds> timeout_;
  const char* ended_ = nullptr;
};

}  // namespace meshcast
