#include "ucx/api.h"

#include <map>
#include <mutex>

#include <dlfcn.h>
#include <fmt/format.h>

#include "common/error.h"

namespace meshcast::ucx {
namespace {

constexpr unsigned kMajor = 1;
constexpr unsigned kMinor = 13;  // the oldest that has been tried

[[noreturn]] void refuse(const std::string& path, const std::string& why) {
  throw Error(ErrorKind::Generic, fmt::format("UCX cannot be used from {}: {}", path, why));
}

template <typename Function>
void look_up(void* library, const std::string& path, const char* name, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(library, name));
  if (!*out) refuse(path, fmt::format("it has no {}; {}.{} or newer is needed", name, kMajor, kMinor));
}

std::unique_ptr<const Api> opened(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) refuse(path, dlerror());  // NOLINT(concurrency-mt-unsafe): glibc's is each thread's own
  auto api = std::make_unique<Api>();
#define MESHCAST_UCX_LOOK_UP(name) look_up(library, path, #name, &api->name)
  MESHCAST_UCX_FUNCTIONS(MESHCAST_UCX_LOOK_UP);
#undef MESHCAST_UCX_LOOK_UP
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  api->ucp_get_version(&major, &minor, &release);
  api->version = fmt::format("{}.{}.{}", major, minor, release);
  if (major != kMajor || minor < kMinor)
    refuse(path, fmt::format("it is {}; {}.{} or newer is needed", api->version, kMajor, kMinor));
  return api;
}

}  // namespace

const Api& load(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, std::unique_ptr<const Api>> loaded;
  const std::lock_guard lock(mutex);
  auto& slot = loaded[path];
  if (!slot) slot = opened(path);
  return *slot;
}

}  // namespace meshcast::ucx
