#pragma once

#include <memory>
#include <string>

#include <ucp/api/ucp.h>

namespace meshcast::ucx {

// The functions of UCX that the data plane calls. They are looked up in a library that is loaded at run time,
// since which one is better depends on the machine. Any version from 1.13 on has them all.
#define MESHCAST_UCX_FUNCTIONS(apply)    \
  apply(ucp_get_version);                \
  apply(ucp_config_read);                \
  apply(ucp_config_modify);              \
  apply(ucp_config_release);             \
  apply(ucp_init_version);               \
  apply(ucp_cleanup);                    \
  apply(ucp_worker_create);              \
  apply(ucp_worker_destroy);             \
  apply(ucp_worker_get_address);         \
  apply(ucp_worker_release_address);     \
  apply(ucp_worker_get_efd);             \
  apply(ucp_worker_arm);                 \
  apply(ucp_worker_signal);              \
  apply(ucp_worker_progress);            \
  apply(ucp_worker_set_am_recv_handler); \
  apply(ucp_ep_create);                  \
  apply(ucp_ep_close_nbx);               \
  apply(ucp_am_send_nbx);                \
  apply(ucp_am_recv_data_nbx);           \
  apply(ucp_request_check_status);       \
  apply(ucp_request_free);               \
  apply(ucs_status_string)

struct Api {
#define MESHCAST_UCX_MEMBER(name) decltype(&::name) name = nullptr  // NOLINT(bugprone-macro-parentheses)
  MESHCAST_UCX_FUNCTIONS(MESHCAST_UCX_MEMBER);
#undef MESHCAST_UCX_MEMBER
  std::string version;  // of the library, as "1.22.0"
};

// Loads libucp from `path`, or from where the system keeps it if that has no slash. The library stays loaded:
// it cannot be unloaded safely. Throws Error where it cannot be loaded, or is too old.
const Api& load(const std::string& path);

}  // namespace meshcast::ucx
