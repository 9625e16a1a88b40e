#pragma once

#include <exception>
#include <string>

#include <pthread.h>

namespace meshcast {

// Names the calling thread in top, gdb and /proc: at most 15 characters.
inline void name_this_thread(const char* name) { pthread_setname_np(pthread_self(), name); }

// The error text if no thread is available. what: its purpose.
inline std::string no_thread(const char* what, const std::exception& error) {
  return std::string("no thread could be had for ") + what + ": " + error.what() +
         ". Raise the limit of threads (ulimit -u, or that of the container), or run fewer of them.";
}

}  // namespace meshcast
