// What newer headers use and older systems lack (cmake/portable.cmake). Hidden, so that nobody else gets them.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

extern "C" {

// glibc 2.33 and 2.30. Before, fstat was an inline function over one of another name, and gettid had none.
__attribute__((visibility("hidden"))) int fstat(int fd, struct stat* status) noexcept {
  return static_cast<int>(syscall(SYS_fstat, fd, status));
}
__attribute__((visibility("hidden"))) pid_t gettid() noexcept {
  return static_cast<pid_t>(syscall(SYS_gettid));
}

// glibc 2.32: whether the process has one thread, so that shared_ptr may count without atomics. Never, here.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// glibc 2.30: std::condition_variable waits with it for times of the steady clock. Before, only the clock of
// the day can be waited for: the time that is left is added to it, and a clock that is set meanwhile shifts the
// end.
__attribute__((visibility("hidden"))) int pthread_cond_clockwait(pthread_cond_t* condition,
                                                                 pthread_mutex_t* mutex, clockid_t clock,
                                                                 const timespec* until) {
  using Function = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const auto newer = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (newer != nullptr) return newer(condition, mutex, clock, until);
  constexpr long kSecond = 1'000'000'000;  // nanoseconds
  timespec now, day;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &day);
  day.tv_sec += until->tv_sec - now.tv_sec;
  day.tv_nsec += until->tv_nsec - now.tv_nsec;
  for (; day.tv_nsec < 0; day.tv_nsec += kSecond) --day.tv_sec;
  for (; day.tv_nsec >= kSecond; day.tv_nsec -= kSecond) ++day.tv_sec;
  return pthread_cond_timedwait(condition, mutex, &day);
}
}
