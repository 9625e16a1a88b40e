#pragma once

#include <pthread.h>

namespace meshcast {

// What the calling thread is called in top, gdb and /proc: at most 15 characters.
inline void name_this_thread(const char* name) { pthread_setname_np(pthread_self(), name); }

}  // namespace meshcast
