#include "common/fault_point.h"

#if MESHCAST_FAULT_POINTS

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <sstream>
#include <stdexcept>
#include <thread>

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace meshcast {
namespace {

struct Fault {
  std::string point;
  int64_t count = 0;
  std::string action;
  double seconds = 0;
  std::string path;
  int port = 0;
  int64_t passed = 0;  // since it was armed
};

std::mutex mutex;  // guards what follows
Fault armed;
std::map<std::string, int64_t> passed;
std::once_flag variable_read;

void write_time(const std::string& path) {
  if (path.empty()) return;
  const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0) throw std::runtime_error("fault point: " + path + " cannot be written");
  dprintf(file, "%.6f\n", now.count());
  close(file);
}

int port_of(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(address).sin6_port);
  return -1;
}

// Descriptors stay open: their owners must notice the failure by themselves.
void cut_connections(bool reset, int spared_port) {
  const int most = static_cast<int>(sysconf(_SC_OPEN_MAX));
  for (int fd = 0; fd < std::min(most, 4096); ++fd) {
    sockaddr_storage peer{};
    socklen_t size = sizeof peer;
    if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) continue;
    const int port = port_of(peer);
    if (port < 0 || port == spared_port) continue;
    if (!reset) {
      shutdown(fd, SHUT_WR);
      continue;
    }
    sockaddr nowhere{};
    nowhere.sa_family = AF_UNSPEC;  // Linux then sends RST
    connect(fd, &nowhere, sizeof nowhere);
  }
}

void act(const Fault& fault) {
  write_time(fault.path);
  const std::string& action = fault.action;
  if (action == "kill") kill(getpid(), SIGKILL);
  if (action == "stop") kill(getpid(), SIGSTOP);
  if (action == "exit") _exit(1);
  if (action == "abort") std::abort();
  if (action == "throw") throw std::bad_alloc();
  if (action == "sleep") std::this_thread::sleep_for(std::chrono::duration<double>(fault.seconds));
  if (action == "reset" || action == "half") cut_connections(action == "reset", fault.port);
}

}  // namespace

void arm_fault(const std::string& text) {
  Fault fault;
  std::istringstream in(text);
  in >> fault.point >> fault.count >> fault.action;
  if (!in) throw std::runtime_error("fault point: cannot read '" + text + "'");
  in >> fault.seconds >> fault.path >> fault.port;
  const std::lock_guard lock(mutex);
  armed = fault;
}

std::map<std::string, int64_t> fault_points_passed() {
  const std::lock_guard lock(mutex);
  return passed;
}

void fault_point(const char* name) {
  std::call_once(variable_read, [] {
    if (const char* text = std::getenv("MESHCAST_FAULT")) arm_fault(text);
  });
  const std::string point = name + std::strlen("fault point ");
  Fault fault;
  {
    const std::lock_guard lock(mutex);
    ++passed[point];
    if (armed.point != point) return;
    ++armed.passed;
    if (armed.count != 0 && armed.passed != armed.count) return;
    fault = armed;
  }
  act(fault);
}

}  // namespace meshcast

#endif
