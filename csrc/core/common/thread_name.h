#pragma once

#include <exception>
#include <string>

#include <pthread.h>

namespace meshcast {

// What the calling thread is called in top, gdb and /proc: at most 15 characters.
inline void name_this_thread(const char* name) { pthread_setname_np(pthread_self(), name); }

// What is said where one cannot be had. what: it is for.
inline std::string no_thread(const char* what, const std::exception& error) {
  return std::string("no thread could be had for ") + what + ": " + error.what() +
         ". Raise the limit of threads (ulimit -u, or that of the container), or run fewer of them.";
}

}  // namespace meshcast
