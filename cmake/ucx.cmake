# Finds UCX: that of the Python package libucx, of UCX_ROOT, or of the system. Defines MESHCAST_WITH_UCX, the library
# meshcast_ucx where there are headers, and MESHCAST_UCX_LIBRARY, which the tests load. The module itself is not linked
# with UCX: which library is better depends on the machine that it runs on.

execute_process(COMMAND "${Python_EXECUTABLE}" -c "import importlib.util as u; print(u.find_spec('libucx').submodule_search_locations[0])"
                OUTPUT_VARIABLE ucx_package ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
# pip builds in the same folder each time, with the headers of an environment that it deletes afterwards; and another
# UCX may be asked for now.
set(ucx_hints "$ENV{UCX_ROOT};${ucx_package}")
set(ucx_asked_before "${MESHCAST_UCX_HINTS}")
set(MESHCAST_UCX_HINTS "${ucx_hints}" CACHE INTERNAL "where UCX was looked for")
if(NOT EXISTS "${MESHCAST_UCX_INCLUDE}/ucp/api/ucp.h" OR (ucx_asked_before AND NOT ucx_asked_before STREQUAL ucx_hints))
  unset(MESHCAST_UCX_INCLUDE CACHE)
endif()
if(NOT EXISTS "${MESHCAST_UCX_LIBRARY}" OR (ucx_asked_before AND NOT ucx_asked_before STREQUAL ucx_hints))
  unset(MESHCAST_UCX_LIBRARY CACHE)
endif()
find_path(MESHCAST_UCX_INCLUDE ucp/api/ucp.h HINTS "$ENV{UCX_ROOT}/include" "${ucx_package}/include")
find_file(MESHCAST_UCX_LIBRARY libucp.so.0 HINTS "$ENV{UCX_ROOT}/lib" "${ucx_package}/lib")
if(MESHCAST_UCX_INCLUDE)
  set(MESHCAST_WITH_UCX 1)
  meshcast_glob(ucx_sources csrc/ucx)
  add_library(meshcast_ucx OBJECT ${ucx_sources})
  meshcast_unity(meshcast_ucx)
  target_link_libraries(meshcast_ucx PUBLIC meshcast_core ${CMAKE_DL_LIBS})
  target_include_directories(meshcast_ucx SYSTEM PUBLIC "${MESHCAST_UCX_INCLUDE}")
  target_compile_definitions(meshcast_ucx PUBLIC MESHCAST_WITH_UCX=1)
  target_precompile_headers(meshcast_ucx REUSE_FROM meshcast_core)
  message(STATUS "meshcast with UCX (${MESHCAST_UCX_INCLUDE})")
else()
  set(MESHCAST_WITH_UCX 0)
  message(WARNING "meshcast: the headers of UCX were not found, so hosts will exchange messages over gloo alone: "
                  "pip install -r requirements-build.txt, install libucx-dev, or set UCX_ROOT; then configure again.")
endif()
