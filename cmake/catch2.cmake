# Defines the interface target meshcast_catch2, or leaves it undefined with a message that says what to do.
# Tests include <catch2/catch.hpp>, the single header of Catch2 2.x; for 3.x cmake/catch2_v3 supplies that name.

find_package(Catch2 3 QUIET)
if(Catch2_FOUND)
  add_library(meshcast_catch2 INTERFACE)
  target_include_directories(meshcast_catch2 INTERFACE "${CMAKE_CURRENT_LIST_DIR}/catch2_v3")
  target_link_libraries(meshcast_catch2 INTERFACE Catch2::Catch2WithMain)
  target_compile_definitions(meshcast_catch2 INTERFACE MESHCAST_CATCH2_MAJOR=3)
else()
  find_path(MESHCAST_CATCH2_INCLUDE catch2/catch.hpp)
  if(MESHCAST_CATCH2_INCLUDE)
    add_library(meshcast_catch2 INTERFACE)
    target_include_directories(meshcast_catch2 SYSTEM INTERFACE "${MESHCAST_CATCH2_INCLUDE}")
    target_compile_definitions(meshcast_catch2 INTERFACE MESHCAST_CATCH2_MAJOR=2)
  endif()
endif()
