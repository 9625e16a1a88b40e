# A module for other machines than this one, as `make wheels` builds it: for systems from glibc 2.28 and GCC 8's
# libstdc++ on, as torch's own wheels are (manylinux_2_28), though the compiler here is newer. No path of this machine
# stays inside.

option(MESHCAST_PORTABLE "Build for older systems than this one, without paths of this machine" OFF)

function(meshcast_make_portable module)
  if(NOT MESHCAST_PORTABLE)
    return()
  endif()
  target_sources(${module} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/cmake/portable/new_functions.cpp")
  set_source_files_properties("${CMAKE_CURRENT_SOURCE_DIR}/cmake/portable/new_functions.cpp" PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  foreach(target IN ITEMS ${module} meshcast_core meshcast_ucx)
    if(TARGET ${target})
      set_target_properties(${target} PROPERTIES DISABLE_PRECOMPILE_HEADERS ON)  # old_symbols.h comes before any other
      target_compile_options(${target} PRIVATE
        "SHELL:-include \"${CMAKE_CURRENT_SOURCE_DIR}/cmake/portable/old_symbols.h\""
        "-ffile-prefix-map=${CMAKE_CURRENT_SOURCE_DIR}=meshcast" "-ffile-prefix-map=${TORCH_ROOT}=torch"
        "-ffile-prefix-map=${CMAKE_BINARY_DIR}=build")
    endif()
  endforeach()
  set_target_properties(${module} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN/../torch/lib")
  target_link_options(${module} PRIVATE -s)
endfunction()
