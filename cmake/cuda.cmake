# Decides from the installed torch, never from a GPU in this machine, what is built, and prints it. Defines
# MESHCAST_WITH_CUDA and the function meshcast_add_cuda(target).
# CMake's own language CUDA is not used: it wants a whole toolkit, of which wheels of CUDA carry parts, and knows
# architectures only in releases that are newer than they are. nvcc is called as the compiler that it is.

set(MESHCAST_CUDA AUTO CACHE STRING "AUTO: follow the installed torch; ON: stop unless CUDA can be built; OFF: CPU only")
set_property(CACHE MESHCAST_CUDA PROPERTY STRINGS AUTO ON OFF)
if(NOT MESHCAST_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "meshcast: MESHCAST_CUDA is \"${MESHCAST_CUDA}\": set it to AUTO, ON or OFF.")
endif()

if(DEFINED ENV{TORCH_CUDA_ARCH_LIST})
  set(MESHCAST_CUDA_ARCH_LIST "$ENV{TORCH_CUDA_ARCH_LIST}")
else()
  set(MESHCAST_CUDA_ARCH_LIST "8.0 8.6 8.9 9.0 10.0+PTX")
endif()

# CUDACXX may be a command line, as for CMake; its first word is the program.
set(nvcc_hints "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
if(DEFINED ENV{CUDACXX})
  separate_arguments(cudacxx UNIX_COMMAND "$ENV{CUDACXX}")
  list(GET cudacxx 0 cudacxx)
  get_filename_component(cudacxx_dir "${cudacxx}" DIRECTORY)
  list(PREPEND nvcc_hints "${cudacxx_dir}")
endif()
find_program(MESHCAST_NVCC nvcc HINTS ${nvcc_hints} PATHS /usr/local/cuda PATH_SUFFIXES bin)

# The release of nvcc and the toolkit it belongs to, which it knows itself when it is called through a wrapper.
set(nvcc_text "not found")
set(nvcc_release "")
if(MESHCAST_NVCC)
  execute_process(COMMAND "${MESHCAST_NVCC}" --version OUTPUT_VARIABLE said ERROR_QUIET)
  if(said MATCHES "release ([0-9]+\\.[0-9]+)")
    set(nvcc_release "${CMAKE_MATCH_1}")
  endif()
  execute_process(COMMAND "${MESHCAST_NVCC}" --dryrun -x cu /dev/null -o /dev/null OUTPUT_QUIET ERROR_VARIABLE said)
  set(MESHCAST_CUDA_ROOT "")
  if(said MATCHES "#\\$ TOP=([^\n]+)")
    get_filename_component(MESHCAST_CUDA_ROOT "${CMAKE_MATCH_1}" REALPATH)
  endif()
  if(EXISTS "${MESHCAST_CUDA_ROOT}/bin/nvcc")
    set(MESHCAST_NVCC_PROGRAM "${MESHCAST_CUDA_ROOT}/bin/nvcc")
  else()
    set(MESHCAST_NVCC_PROGRAM "${MESHCAST_NVCC}")
  endif()
  set(nvcc_text "${MESHCAST_NVCC_PROGRAM} (${nvcc_release})")
endif()
set(torch_cuda_text "none (CPU build of torch)")
if(TORCH_CUDA)
  set(torch_cuda_text "${TORCH_CUDA}")
endif()

# Why not, as half a sentence that says what to do. Minor releases of CUDA fit together, major ones do not.
set(obstacle "")
string(REGEX MATCH "^[0-9]+" torch_cuda_major "${TORCH_CUDA}")
string(REGEX MATCH "^[0-9]+" nvcc_major "${nvcc_release}")
if(NOT TORCH_CUDA)
  set(obstacle "torch ${TORCH_VERSION} at ${TORCH_ROOT} has no CUDA: install a CUDA build of torch, or set MESHCAST_CUDA=OFF")
elseif(NOT nvcc_release)
  set(obstacle "no nvcc that works was found: install the CUDA toolkit ${TORCH_CUDA}, or set CUDACXX to its nvcc or CUDA_HOME to its folder")
elseif(NOT torch_cuda_major STREQUAL nvcc_major)
  set(obstacle "torch ${TORCH_VERSION} is built with CUDA ${TORCH_CUDA}, and ${MESHCAST_NVCC_PROGRAM} is of CUDA ${nvcc_release}: set CUDACXX to an nvcc of CUDA ${torch_cuda_major}")
endif()
if(NOT obstacle)
  # torch's own CUDA runtime: of the wheels beside it, in its folder, or of the toolkit it was built with.
  file(GLOB runtimes "${TORCH_ROOT}/../nvidia/cu${torch_cuda_major}/lib/libcudart.so.*"
       "${TORCH_ROOT}/../nvidia/cuda_runtime/lib/libcudart.so.*" "${TORCH_ROOT}/lib/libcudart*.so*"
       "${MESHCAST_CUDA_ROOT}/lib64/libcudart.so*")
  if(runtimes)
    list(GET runtimes 0 MESHCAST_CUDART)
  else()
    set(obstacle "libcudart, which torch ${TORCH_VERSION} needs too, was found neither beside it nor in ${MESHCAST_CUDA_ROOT}: install torch again")
  endif()
endif()
if(MESHCAST_CUDA STREQUAL "ON" AND obstacle)
  message(FATAL_ERROR "meshcast: MESHCAST_CUDA=ON, but ${obstacle}.")
endif()

set(MESHCAST_WITH_CUDA 0)
if(MESHCAST_CUDA STREQUAL "OFF")
  set(cuda_outcome "CPU only: MESHCAST_CUDA=OFF")
elseif(obstacle)
  set(cuda_outcome "CPU only: ${obstacle}")
else()
  set(MESHCAST_WITH_CUDA 1)
  set(cuda_outcome "CPU and CUDA ${nvcc_release}")
endif()
message(STATUS "CUDA: MESHCAST_CUDA=${MESHCAST_CUDA}; CUDA of torch: ${torch_cuda_text}; nvcc: ${nvcc_text}; architectures: ${MESHCAST_CUDA_ARCH_LIST}")
message(STATUS "CUDA: built is ${cuda_outcome}")

# -gencode options of a list such as "8.0 9.0a 10.0+PTX".
function(meshcast_gencode result)
  string(REGEX REPLACE "[ ;,]+" ";" architectures "${MESHCAST_CUDA_ARCH_LIST}")
  set(options)
  foreach(name IN LISTS architectures)
    if(NOT name MATCHES "^([0-9]+)\\.([0-9][a-z]?)(\\+PTX)?$")
      message(FATAL_ERROR "meshcast: TORCH_CUDA_ARCH_LIST names \"${name}\": write numbers such as 9.0 or 10.0+PTX.")
    endif()
    set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    list(APPEND options "-gencode=arch=compute_${number},code=sm_${number}")
    if(CMAKE_MATCH_3)
      list(APPEND options "-gencode=arch=compute_${number},code=compute_${number}")
    endif()
  endforeach()
  if(NOT options)
    message(FATAL_ERROR "meshcast: TORCH_CUDA_ARCH_LIST is empty: name an architecture, such as 9.0, or unset it.")
  endif()
  set(${result} "${options}" PARENT_SCOPE)
endfunction()

# Compiles csrc/cuda/*.cu into the target and links it with torch's CUDA.
function(meshcast_add_cuda target)
  meshcast_gencode(gencode)
  # 20208: fmt's long double, which no kernel has. No fused multiply-add: reductions give the bits of the CPU. Kernels wait for memory anyway.
  set(options -std=c++20 -O3 -lineinfo -fmad=false --expt-relaxed-constexpr -diag-suppress=20208 -ccbin "${CMAKE_CXX_COMPILER}"
      -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra ${gencode} -I "${CMAKE_CURRENT_SOURCE_DIR}/csrc"
      -isystem "${TORCH_ROOT}/include" -D_GLIBCXX_USE_CXX11_ABI=${TORCH_CXX11_ABI} -DFMT_HEADER_ONLY=1
      -DMESHCAST_E4M3_SATURATES=${TORCH_E4M3_SATURATES})
  if(MESHCAST_WERROR)
    list(APPEND options -Werror=all-warnings -Xcompiler=-Werror)
  endif()
  file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/*.cu")
  file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/cuda_objects")
  foreach(source IN LISTS sources)
    get_filename_component(name "${source}" NAME_WE)
    set(object "${CMAKE_BINARY_DIR}/cuda_objects/${name}.o")
    add_custom_command(OUTPUT "${object}" COMMENT "Building CUDA object ${name}.o" VERBATIM
                       COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} "${MESHCAST_NVCC_PROGRAM}" ${options} -MD -MF "${object}.d"
                               -c "${source}" -o "${object}"
                       DEPENDS "${source}" DEPFILE "${object}.d")
    target_sources(${target} PRIVATE "${object}")
    set_source_files_properties("${object}" PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  endforeach()
  get_filename_component(cudart_folder "${MESHCAST_CUDART}" DIRECTORY)
  target_link_libraries(${target} PRIVATE "${TORCH_ROOT}/lib/libc10_cuda${CMAKE_SHARED_LIBRARY_SUFFIX}" "${MESHCAST_CUDART}")
  set_property(TARGET ${target} APPEND PROPERTY BUILD_RPATH "${cudart_folder}")
  target_compile_definitions(${target} PRIVATE MESHCAST_WITH_CUDA=1)
  target_include_directories(${target} SYSTEM PRIVATE "${MESHCAST_CUDA_ROOT}/include")
endfunction()
