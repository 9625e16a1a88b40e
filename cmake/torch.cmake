# Finds the torch of the Python interpreter and defines the interface target meshcast_torch.
# torch's own package file is not used: for a CUDA torch it insists on a full CUDA toolkit, also where only
# C++ is compiled.

if(NOT Python_EXECUTABLE)
  find_program(Python_EXECUTABLE NAMES python3 python REQUIRED)
endif()

set(MESHCAST_TORCH_SITE "" CACHE PATH "Folder of the packages with torch, where the interpreter does not see them by itself")

# Importing torch takes seconds, and adding a source file configures again: the answer is kept until
# torch's version file changes.
if(MESHCAST_TORCH_FACTS AND EXISTS "${MESHCAST_TORCH_STAMP_FILE}")
  file(TIMESTAMP "${MESHCAST_TORCH_STAMP_FILE}" stamp)
endif()
if(NOT MESHCAST_TORCH_FACTS MATCHES "TORCH_CUDA_ARCHITECTURES" OR NOT stamp OR NOT "${Python_EXECUTABLE} ${stamp}" STREQUAL "${MESHCAST_TORCH_STAMP}")
  execute_process(COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/torch_probe.py" "${MESHCAST_TORCH_SITE}"
                  OUTPUT_VARIABLE facts ERROR_VARIABLE problem RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    string(STRIP "${problem}" problem)
    message(FATAL_ERROR "meshcast: ${problem}")
  endif()
  string(STRIP "${facts}" facts)
  string(REPLACE "\n" ";" facts "${facts}")
  set(MESHCAST_TORCH_FACTS "${facts}" CACHE INTERNAL "what torch_probe.py printed")
endif()
foreach(fact IN LISTS MESHCAST_TORCH_FACTS)
  if(fact MATCHES "^([A-Z0-9_]+)=(.*)$")
    set(${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
  endif()
endforeach()
set(MESHCAST_TORCH_STAMP_FILE "${TORCH_ROOT}/version.py" CACHE INTERNAL "")
file(TIMESTAMP "${MESHCAST_TORCH_STAMP_FILE}" stamp)
set(MESHCAST_TORCH_STAMP "${Python_EXECUTABLE} ${stamp}" CACHE INTERNAL "")

set(MESHCAST_TORCH_MINIMUM 2.11)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" TORCH_MINOR "${TORCH_VERSION}")
if(TORCH_MINOR VERSION_LESS MESHCAST_TORCH_MINIMUM)
  message(FATAL_ERROR "meshcast: torch ${TORCH_VERSION} at ${TORCH_ROOT} is too old: install torch ${MESHCAST_TORCH_MINIMUM} or newer.")
endif()
if(NOT TORCH_DISTRIBUTED)
  message(FATAL_ERROR "meshcast: torch ${TORCH_VERSION} at ${TORCH_ROOT} was built without torch.distributed: install a torch that has it.")
endif()

add_library(meshcast_torch INTERFACE)
# SYSTEM: warnings of torch's headers are not ours to fix.
target_include_directories(meshcast_torch SYSTEM INTERFACE "${TORCH_ROOT}/include"
                           "${TORCH_ROOT}/include/torch/csrc/api/include" "${PYTHON_INCLUDE}")
target_compile_definitions(meshcast_torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${TORCH_CXX11_ABI} USE_DISTRIBUTED)
foreach(name torch_python torch torch_cpu c10)
  set(library "${TORCH_ROOT}/lib/lib${name}${CMAKE_SHARED_LIBRARY_SUFFIX}")
  if(NOT EXISTS "${library}")
    message(FATAL_ERROR "meshcast: ${library} is missing, so torch ${TORCH_VERSION} is incomplete: reinstall torch.")
  endif()
  target_link_libraries(meshcast_torch INTERFACE "${library}")
endforeach()

# The torch-free part may use fmt and nothing else of torch: a link to that one folder makes any other include fail.
set(MESHCAST_FMT_INCLUDE "${CMAKE_BINARY_DIR}/fmt_only")
file(MAKE_DIRECTORY "${MESHCAST_FMT_INCLUDE}")
file(CREATE_LINK "${TORCH_ROOT}/include/fmt" "${MESHCAST_FMT_INCLUDE}/fmt" SYMBOLIC)
