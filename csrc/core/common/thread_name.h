#pragma once

#include <exception>
#include <future>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <pthread.h>

#include "common/error.h"

namespace meshcast {

// What the calling thread is called in top, gdb and /proc: at most 15 characters.
inline void name_this_thread(const char* name) { pthread_setname_np(pthread_self(), name); }

// What is said where one cannot be had. what: it is for.
inline std::string no_thread(const char* what, const std::exception& error) {
  return std::string("no thread could be had for ") + what + ": " + error.what() +
         ". Raise the limit of threads (ulimit -u, or that of the container), or run fewer of them.";
}

// Starts and ends `count` threads, all there at once. For libraries that end the process where they cannot have
// theirs: what these leave (the stacks, the places in the system's count) is there for the next. Throws Error.
inline void require_threads(int count, const char* what) {
  std::promise<void> all_there;
  const std::shared_future<void> over = all_there.get_future().share();
  std::vector<std::thread> threads;
  threads.reserve(count);
  std::string missing;
  try {
    for (int i = 0; i < count; ++i) threads.emplace_back([over] { over.wait(); });
  } catch (const std::system_error& error) {
    missing = no_thread(what, error);
  }
  all_there.set_value();
  for (std::thread& thread : threads) thread.join();
  if (!missing.empty()) throw Error(ErrorKind::Generic, missing);
}

}  // namespace meshcast
