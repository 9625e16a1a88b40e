// Included first in every file of a portable build (cmake/portable.cmake). Of functions that glibc and
// libstdc++ gave a new version, the old ones are taken: they are the same code, and older systems have them
// too.
#pragma once

#if defined(__x86_64__)
#define MESHCAST_OLDEST "GLIBC_2.2.5"
#define MESHCAST_SETNAME "GLIBC_2.12"
#elif defined(__aarch64__)
#define MESHCAST_OLDEST "GLIBC_2.17"
#define MESHCAST_SETNAME "GLIBC_2.17"
#else
#error "which versions of these functions are old is not known for this processor"
#endif

__asm__(".symver dlopen,dlopen@" MESHCAST_OLDEST);
__asm__(".symver dlsym,dlsym@" MESHCAST_OLDEST);
__asm__(".symver dlerror,dlerror@" MESHCAST_OLDEST);
__asm__(".symver pthread_once,pthread_once@" MESHCAST_OLDEST);
__asm__(".symver pthread_setname_np,pthread_setname_np@" MESHCAST_SETNAME);
// std::condition_variable::wait
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
