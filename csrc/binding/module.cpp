#include "binding/bind.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "C++ side of meshcast. Use the names of the package meshcast instead.";
  meshcast::bind_errors(m);
  meshcast::bind_plan(m);
  meshcast::bind_runtime(m);
  meshcast::bind_conversation(m);
  meshcast::bind_record(m);
  meshcast::bind_groups(m);
  meshcast::bind_calls(m);
  meshcast::bind_autograd(m);
#if MESHCAST_FAULT_POINTS
  meshcast::bind_faults(m);
#endif
#if MESHCAST_WITH_UCX
  meshcast::bind_ucx(m);
#endif
#if MESHCAST_WITH_CUDA
  meshcast::bind_cuda(m);
  meshcast::bind_cuda_group(m);
#endif
}
