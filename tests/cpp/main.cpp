// Catch2 2.x compiles its runner in one file that asks for it; 3.x brings a library with main().
#if MESHCAST_CATCH2_MAJOR == 2
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
#endif

#if defined(__SANITIZE_THREAD__)
// Tests fork processes that start threads.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }
#endif
