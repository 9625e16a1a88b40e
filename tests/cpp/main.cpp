// Catch2 2.x compiles its runner in one file that asks for it; 3.x brings a library with main().
#if MESHCAST_CATCH2_MAJOR == 2
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
#endif
