#pragma once

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

namespace meshcast {

// The Python classes of meshcast.errors, one for one; the binding translates by this value.
enum class ErrorKind : uint8_t {
  Generic,           // MeshcastError
  Layout,            // LayoutError: bad shape, placement, mesh, rank, topology or JSON
  PlanMismatch,      // PlanMismatchError: ranks called with different arguments
  DeadlineExceeded,  // DeadlineExceededError
  PeerLost,          // PeerLostError
  Aborted,           // AbortedError: the group failed before; carries the first cause
};

// The facts that an error may carry. -1 (or an empty string) means "does not apply".
struct ErrorContext {
  int32_t rank = -1;      // global rank that raises
  int32_t peer = -1;      // global rank at the other end
  std::string op{};       // "reshard", "plan", ...
  int64_t sequence = -1;  // ordinal of the call in its lane
  std::string phase{};    // "connect", "agree", "start", "transfer", "wait"
  double elapsed = -1;    // seconds since the call was made
  double limit = -1;      // seconds it was allowed

  // PeerLost only.
  int64_t bytes_done = -1;      // received by this rank in the call, from all peers
  int64_t bytes_expected = -1;  // what it was to receive in all
  std::string address{};        // of the peer, if known
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, ErrorContext context = {})
      : std::runtime_error(message), kind_(kind), context_(std::move(context)) {}

  ErrorKind kind() const noexcept { return kind_; }
  const ErrorContext& context() const noexcept { return context_; }

 private:
  ErrorKind kind_;
  ErrorContext context_;
};

// Invalid input, found before anything was planned or sent.
class LayoutError : public Error {
 public:
  explicit LayoutError(const std::string& message) : Error(ErrorKind::Layout, message) {}
};

// The text of an exception.
inline std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an unknown error";
  }
}

}  // namespace meshcast
