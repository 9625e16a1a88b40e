# Defines the interface target meshcast_catch2, or leaves it undefined with a message that says what to do.
# Tests include <catch2/catch.hpp>, the single header of Catch2 2.x; for 3.x cmake/catch2_v3 supplies that name.
#
# MESHCAST_FETCH_CATCH2, which `make test` sets, is for a machine without Catch2: root gets the distribution's package,
# other users get the header of a release in build/fetched, where all later builds find it without a network.
# file(DOWNLOAD) and not FetchContent: without a network FetchContent ends the configuration with a page of errors, and
# the Python tests need none of this.

option(MESHCAST_FETCH_CATCH2 "Install or download Catch2 where it is missing" OFF)
set(MESHCAST_CATCH2_URL "https://github.com/catchorg/Catch2/releases/download/v2.13.10/catch.hpp" CACHE STRING "Header of Catch2 2.x")
set(catch2_hash 3725c0f0a75f376a5005dde31ead0feb8f7da7507644c201b814443de8355170)
set(catch2_fetched "${CMAKE_CURRENT_SOURCE_DIR}/build/fetched")

macro(meshcast_find_catch2)
  find_package(Catch2 3 QUIET)
  find_path(MESHCAST_CATCH2_INCLUDE catch2/catch.hpp PATHS "${catch2_fetched}")
endmacro()

meshcast_find_catch2()
find_program(MESHCAST_APT_GET apt-get)
if(MESHCAST_FETCH_CATCH2 AND NOT Catch2_FOUND AND NOT MESHCAST_CATCH2_INCLUDE AND MESHCAST_APT_GET)
  execute_process(COMMAND id -u OUTPUT_VARIABLE catch2_user OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(catch2_user EQUAL 0)
    message(STATUS "meshcast: installing the distribution's package catch2")
    # A fresh system has no package lists yet.
    execute_process(COMMAND sh -c "\"$0\" install -y -qq catch2 || { \"$0\" update -qq && \"$0\" install -y -qq catch2; }"
                    "${MESHCAST_APT_GET}" OUTPUT_QUIET ERROR_QUIET)
    meshcast_find_catch2()
  endif()
endif()
if(MESHCAST_FETCH_CATCH2 AND NOT Catch2_FOUND AND NOT MESHCAST_CATCH2_INCLUDE)
  message(STATUS "meshcast: downloading ${MESHCAST_CATCH2_URL}")
  # EXPECTED_HASH would end the configuration as well.
  file(DOWNLOAD "${MESHCAST_CATCH2_URL}" "${catch2_fetched}/catch.hpp" STATUS catch2_status
       TIMEOUT 120 INACTIVITY_TIMEOUT 20 TLS_VERIFY ON)
  file(SHA256 "${catch2_fetched}/catch.hpp" catch2_found_hash)
  if(catch2_found_hash STREQUAL catch2_hash)
    file(COPY "${catch2_fetched}/catch.hpp" DESTINATION "${catch2_fetched}/catch2")
    meshcast_find_catch2()
  else()
    list(JOIN catch2_status ", " catch2_status)
    message(STATUS "meshcast: Catch2 was not downloaded (${catch2_status}, SHA256 ${catch2_found_hash})")
  endif()
  file(REMOVE "${catch2_fetched}/catch.hpp")
endif()

set(MESHCAST_HAS_CATCH2 0 CACHE INTERNAL "whether there is a target meshcast_catch2; tools/run_tests.sh reads it")
if(Catch2_FOUND OR MESHCAST_CATCH2_INCLUDE)
  set(MESHCAST_HAS_CATCH2 1 CACHE INTERNAL "")
endif()
if(Catch2_FOUND)
  add_library(meshcast_catch2 INTERFACE)
  target_include_directories(meshcast_catch2 INTERFACE "${CMAKE_CURRENT_LIST_DIR}/catch2_v3")
  target_link_libraries(meshcast_catch2 INTERFACE Catch2::Catch2WithMain)
  target_compile_definitions(meshcast_catch2 INTERFACE MESHCAST_CATCH2_MAJOR=3)
elseif(MESHCAST_CATCH2_INCLUDE)
  add_library(meshcast_catch2 INTERFACE)
  target_include_directories(meshcast_catch2 SYSTEM INTERFACE "${MESHCAST_CATCH2_INCLUDE}")
  target_compile_definitions(meshcast_catch2 INTERFACE MESHCAST_CATCH2_MAJOR=2)
endif()
