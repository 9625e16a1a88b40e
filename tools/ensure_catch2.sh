#!/bin/bash
# Makes sure that Catch2, which the C++ tests need, is there. Exit status: 0 found or installed; 3 absent.
set -u
found() { echo '#include <catch2/catch.hpp>' | ${CXX:-c++} -x c++ -E - >/dev/null 2>&1 ||
          echo '#include <catch2/catch_all.hpp>' | ${CXX:-c++} -x c++ -E - >/dev/null 2>&1; }

found && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Catch2 is missing: installing the distribution's package catch2 ..."
  # A fresh system has no package lists yet.
  if { apt-get install -y -qq catch2 || { apt-get update -qq && apt-get install -y -qq catch2; }; } >/dev/null 2>&1 &&
     found; then
    exit 0
  fi
fi
cat >&2 <<'TEXT'
meshcast: Catch2 was not found and could not be installed from here, so the C++ tests cannot be built.
Install it (Debian and Ubuntu: apt-get install catch2; Fedora: dnf install catch-devel; 2.x and 3.x both work), or run
the Python tests alone with MESHCAST_ALLOW_NO_CATCH2=1 make test.
TEXT
exit 3
