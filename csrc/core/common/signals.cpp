#include "common/signals.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>

#include <unistd.h>

namespace meshcast {
namespace {

std::atomic<void (*)()> look_of_process{nullptr};

std::atomic<int> signal_counter{-1};
struct sigaction handler_before {};  // of the one signal that is caught

void count_signal(int number, siginfo_t* info, void* context) {
  const int error = errno;
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(signal_counter, &one, sizeof(one));  // fails for -1
  errno = error;
  if ((handler_before.sa_flags & SA_SIGINFO) != 0) return handler_before.sa_sigaction(number, info, context);
  if (handler_before.sa_handler != SIG_DFL) handler_before.sa_handler(number);
}

}  // namespace

bool also_catch(int number) {
  struct sigaction found {};
  sigaction(number, nullptr, &found);
  const bool is_function = (found.sa_flags & SA_SIGINFO) != 0;
  if (is_function && found.sa_sigaction == &count_signal) return true;
  if (!is_function && found.sa_handler == SIG_IGN) return false;
  handler_before = found;
  struct sigaction ours = found;
  ours.sa_flags |= SA_SIGINFO | SA_ONSTACK;
  if (!is_function && found.sa_handler == SIG_DFL) ours.sa_flags |= SA_RESTART;
  ours.sa_sigaction = &count_signal;
  return sigaction(number, &ours, nullptr) == 0;
}

void count_signals_by(int eventfd) { signal_counter = eventfd; }

void look_for_signals_by(void (*look)()) { look_of_process = look; }

void look_for_signals() {
  if (auto* look = look_of_process.load()) look();
}

}  // namespace meshcast
