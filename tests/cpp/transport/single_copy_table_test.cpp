#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <vector>

#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "catch.h"
#include "memory/strided.h"

using namespace meshcast;

namespace {

constexpr int64_t kLargest = int64_t{64} << 20;
constexpr int64_t kSlot = 128 << 10;
constexpr int64_t kWarmSlots = 4;                // a sender that keeps up uses the slots that were freed last
constexpr int64_t kStreamed = int64_t{2} << 20;  // as runs do, see Run
constexpr size_t kPieces = 1024;                 // that one process_vm_readv takes (IOV_MAX)
constexpr int kPitch = 4;                        // the sender holds so many times the columns that it sends

// Private memory, as tensors have it.
std::byte* memory(int64_t nbytes) {
  void* base =
      mmap(nullptr, static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(base != MAP_FAILED);
  std::memset(base, 3, static_cast<size_t>(nbytes));
  return static_cast<std::byte*>(base);
}

// A message of rows of `width` bytes, at either end of it: with gaps, or without.
StridedView rows(std::byte* data, int64_t nbytes, int64_t width, bool gaps) {
  StridedView out;
  out.data = data;
  out.ndim = 2;
  out.element_bytes = 4;
  out.extent[0] = nbytes / width;
  out.extent[1] = width / 4;
  out.stride[0] = gaps ? kPitch * width : width;
  out.stride[1] = 4;
  return out;
}

// One copy, made by the kernel, for each receiver.
void read_directly(pid_t process, const StridedView& from, std::byte* out) {
  const auto width = static_cast<size_t>(from.extent[1] * 4);
  const auto count = static_cast<size_t>(from.contiguous() ? 1 : from.extent[0]);
  const size_t nbytes = from.contiguous() ? static_cast<size_t>(from.nbytes()) : width;
  std::vector<iovec> pieces(std::min(count, kPieces));
  for (size_t first = 0; first < count; first += kPieces) {
    const size_t here = std::min(kPieces, count - first);
    for (size_t i = 0; i < here; ++i)
      pieces[i] = {from.data + static_cast<int64_t>(first + i) * from.stride[0], nbytes};
    const iovec local{out + first * nbytes, here * nbytes};
    REQUIRE(process_vm_readv(process, &local, 1, pieces.data(), here, 0) ==
            static_cast<ssize_t>(here * nbytes));
  }
}

// One copy in, and one out for each receiver, as the transport makes them.
void through_slots(std::byte* slots, const StridedView& from, const std::vector<StridedView>& outs) {
  const int64_t nbytes = from.nbytes();
  const Write write = nbytes > kStreamed ? Write::Streamed : Write::Cached;
  for (int64_t at = 0; at < nbytes; at += kSlot) {
    const int64_t here = std::min(kSlot, nbytes - at);
    std::byte* slot = slots + at / kSlot % kWarmSlots * kSlot;
    pack_range(from, at, here, slot);
    for (const StridedView& out : outs) unpack_range(slot, out, at, here, write);
  }
}

// Of this thread, user and system.
double cpu_microseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

}  // namespace

// CPU time of both ends together. Rounds in turn, medians; the first round does not count.
TEST_CASE("table: one copy by the kernel beside two through slots", "[.][tables]") {
  std::byte* source = memory(kPitch * kLargest);
  const pid_t sender = fork();
  REQUIRE(sender >= 0);
  if (sender == 0) {
    std::memset(source, 3, static_cast<size_t>(kPitch * kLargest));  // its own pages, at the same addresses
    for (;;) pause();
  }
  void* shared = mmap(nullptr, kSlot * kWarmSlots, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(shared != MAP_FAILED);
  auto* slots = static_cast<std::byte*>(shared);
  std::vector<std::byte*> outs;
  for (int i = 0; i < 3; ++i) outs.push_back(memory(kLargest));
  std::printf(
      "| bytes | rows | receivers | direct, us | slots, us | direct / slots "
      "|\n|---:|---|---:|---:|---:|---:|\n");
  for (const int64_t width : {int64_t{0}, int64_t{1} << 10, int64_t{8} << 10, int64_t{64} << 10}) {
    for (int64_t nbytes = std::max<int64_t>(1 << 10, 4 * width); nbytes <= kLargest; nbytes *= 8) {
      const StridedView from = rows(source, nbytes, width ? width : nbytes, width != 0);
      for (const size_t receivers : {size_t{1}, size_t{3}}) {
        std::vector<StridedView> to;
        for (size_t i = 0; i < receivers; ++i) to.push_back(rows(outs[i], nbytes, nbytes, false));
        std::vector<double> direct;
        std::vector<double> slotted;
        const int64_t rounds = std::clamp<int64_t>((int64_t{256} << 20) / nbytes, 7, 500);
        for (int64_t round = 0; round <= rounds; ++round) {
          const double begin = cpu_microseconds();
          for (const StridedView& out : to) read_directly(sender, from, out.data);
          const double middle = cpu_microseconds();
          through_slots(slots, from, to);
          const double end = cpu_microseconds();
          if (round == 0) continue;
          direct.push_back(middle - begin);
          slotted.push_back(end - middle);
        }
        const double ours = median(direct);
        const double theirs = median(slotted);
        std::printf("| %lld | ", static_cast<long long>(nbytes));
        width
            ? std::printf("%lld of %lld", static_cast<long long>(width), static_cast<long long>(kPitch * width))
            : std::printf("no gaps");
        std::printf(" | %zu | %.1f | %.1f | %.2f |\n", receivers, ours, theirs, ours / theirs);
      }
    }
  }
  kill(sender, SIGKILL);
  waitpid(sender, nullptr, 0);
}
