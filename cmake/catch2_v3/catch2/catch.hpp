#pragma once

// The tests are written against Catch2 2.x; these names moved into namespaces in 3.x.
#include <catch2/catch_all.hpp>

using Catch::Approx;
using namespace Catch::Matchers;  // NOLINT: this header exists to restore the old names
