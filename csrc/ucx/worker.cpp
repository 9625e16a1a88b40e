#include "ucx/worker.h"

#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <thread>

#include <fmt/format.h>

#include "common/error.h"
#include "common/thread_name.h"
#include "ucx/forked.h"

namespace meshcast::ucx {
namespace {

// The version for which the structures of UCX are compiled: their fields are masked, so a newer library accepts
// them.
constexpr unsigned kApiMajor = 1;
constexpr unsigned kApiMinor = 13;

// The user's setting for UCX; null if there is none.
const char* given(const std::string& name) {
  return std::getenv(("UCX_" + name).c_str());  // NOLINT(concurrency-mt-unsafe): UCX reads it in the same way
}

// Starts a thread and ends it. UCX ends the process if it cannot have its own: the resources of this one (the
// stack, the place in the system's count) are then free for that. Throws Error.
void require_thread(const char* what) {
  try {
    std::thread([] {}).join();
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::Generic, no_thread(what, error));
  }
}

}  // namespace

void Worker::check(ucs_status_t status, const char* what) const {
  if (status != UCS_OK) {
    throw Error(ErrorKind::Generic,
                fmt::format("UCX {}: {} failed: {}", api_.version, what, api_.ucs_status_string(status)));
  }
}

Worker::Worker(const Api& api, const std::string& device, const std::map<std::string, std::string>& settings)
    : api_(api) {
  require_thread("messages over UCX");  // UCX starts one of its own with the first worker
  ucp_config_t* config = nullptr;
  check(api_.ucp_config_read(nullptr, nullptr, &config), "ucp_config_read");
  for (const auto& [name, value] : settings) {
    if (!given(name)) api_.ucp_config_modify(config, name.c_str(), value.c_str());
  }
  if (!device.empty()) api_.ucp_config_modify(config, "NET_DEVICES", device.c_str());
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  const ucs_status_t status = api_.ucp_init_version(kApiMajor, kApiMinor, &params, config, &context_);
  api_.ucp_config_release(config);
  const char* devices = given("NET_DEVICES");
  devices_ = !device.empty() ? device : devices ? devices : "all devices";
  check(status, fmt::format("ucp_init on {}", devices_).c_str());

  try {
    ucp_worker_params_t worker_params{};
    worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker_params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
    check(api_.ucp_worker_create(context_, &worker_params, &worker_), "ucp_worker_create");
    check(api_.ucp_worker_get_efd(worker_, &event_fd_), "ucp_worker_get_efd");
    ucp_address_t* address = nullptr;
    size_t length = 0;
    check(api_.ucp_worker_get_address(worker_, &address, &length), "ucp_worker_get_address");
    address_.assign(reinterpret_cast<const char*>(address), length);
    api_.ucp_worker_release_address(worker_, address);
    close_in_children_of(event_fd_);
  } catch (...) {
    if (worker_) api_.ucp_worker_destroy(worker_);
    api_.ucp_cleanup(context_);
    throw;
  }
}

Worker::~Worker() {
  gone(event_fd_);
  api_.ucp_worker_destroy(worker_);
  api_.ucp_cleanup(context_);
}

void Worker::on_message(unsigned id, ucp_am_recv_callback_t callback, void* argument) {
  ucp_am_handler_param_t param{};
  param.field_mask =
      UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
  param.id = id;
  param.cb = callback;
  param.arg = argument;
  check(api_.ucp_worker_set_am_recv_handler(worker_, &param), "ucp_worker_set_am_recv_handler");
}

ucp_ep_h Worker::connect(const std::string& address, ucp_err_handler_cb_t failed, void* argument) {
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = failed;
  params.err_handler.arg = argument;
  ucp_ep_h endpoint = nullptr;
  errno = 0;
  const ucs_status_t status = api_.ucp_ep_create(worker_, &params, &endpoint);
  // On the peer's own host the system refuses at once, before UCX has looked for anything else.
  if (status == UCS_ERR_UNREACHABLE && errno == ECONNREFUSED)
    throw Error(ErrorKind::Generic, "its process has ended: it refuses connections");
  if (status == UCS_ERR_UNREACHABLE)
    throw Error(
        ErrorKind::Generic,
        fmt::format(
            "UCX {}: no way to the peer from {}: it has ended, or the interface does not lead there. UCX "
            "takes one only for peers to which this host's best route begins there; name another with "
            "MESHCAST_IFNAMES, several with UCX_NET_DEVICES, or set MESHCAST_TRANSPORT=gloo",
            api_.version, devices_));
  check(status, "ucp_ep_create");
  return endpoint;
}

}  // namespace meshcast::ucx
