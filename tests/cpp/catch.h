#pragma once

// Catch2 2.x is one header, 3.x a library with many.
#if MESHCAST_CATCH2_MAJOR == 2
#include <catch2/catch.hpp>
#else
#include <catch2/catch_all.hpp>
#endif
