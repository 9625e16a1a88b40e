#include "memory/digest.h"

#include <array>
#include <cstring>
#include <random>
#include <vector>

#include "catch.h"

using meshcast::DigestNans;
using meshcast::kMaxDims;
using meshcast::StridedView;

namespace {

// A dense tensor, whose memory is exactly as large: what reads beyond it is found with the sanitizers.
struct Tensor {
  std::vector<int64_t> shape;
  int64_t element_bytes = 1;
  std::vector<std::byte> memory;

  Tensor(std::mt19937& rng, std::vector<int64_t> extents, int64_t bytes)
      : shape(std::move(extents)), element_bytes(bytes) {
    int64_t nbytes = bytes;
    for (const int64_t n : shape) nbytes *= n;
    memory.resize(static_cast<size_t>(nbytes));
    for (std::byte& each : memory) each = static_cast<std::byte>(rng());
  }

  std::array<int64_t, kMaxDims> steps(int64_t unit) const {
    std::array<int64_t, kMaxDims> out{};
    for (size_t d = shape.size(); d-- > 0; unit *= shape[d]) out[d] = unit;
    return out;
  }

  uint64_t digest(const std::vector<int64_t>& lo, const std::vector<int64_t>& hi, const DigestNans& nans) {
    const auto step = steps(1);
    StridedView view{memory.data(), static_cast<int>(shape.size()), element_bytes, {}, steps(element_bytes)};
    int64_t first = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      view.extent[d] = hi[d] - lo[d];
      view.data += lo[d] * view.stride[d];
      first += lo[d] * step[d];
    }
    return meshcast::digest(view, first, step, nans);
  }

  uint64_t digest(const DigestNans& nans) { return digest(std::vector<int64_t>(shape.size(), 0), shape, nans); }
};

// Of two parts of a tensor together.
uint64_t added(uint64_t a, uint64_t b) {
  const auto lower = static_cast<uint32_t>(a + b);
  const auto upper = static_cast<uint32_t>((a >> 32) + (b >> 32));
  return uint64_t{upper} << 32 | lower;
}

}  // namespace

TEST_CASE("digests of parts add up to that of the whole, and one byte changes it", "[exec][digest]") {
  const uint32_t seed = 26;
  INFO("seed " << seed);
  std::mt19937 rng(seed);
  for (int round = 0; round < 300; ++round) {
    std::vector<int64_t> shape(1 + rng() % 4);
    for (int64_t& n : shape) n = std::array<int64_t, 5>{1, 2, 5, 17, 70}[rng() % 5];
    const int64_t element_bytes = std::array<int64_t, 5>{1, 2, 4, 8, 16}[rng() % 5];
    const DigestNans nans;
    Tensor tensor(rng, shape, element_bytes);
    const uint64_t whole = tensor.digest(nans);

    const size_t cut = rng() % shape.size();
    std::vector<int64_t> lo(shape.size(), 0);
    std::vector<int64_t> hi = shape;
    hi[cut] = static_cast<int64_t>(rng() % static_cast<uint64_t>(shape[cut] + 1));
    uint64_t sum = tensor.digest(lo, hi, nans);
    lo[cut] = hi[cut];
    hi[cut] = shape[cut];
    sum = added(sum, tensor.digest(lo, hi, nans));
    CHECK(sum == whole);

    tensor.memory[rng() % tensor.memory.size()] ^= static_cast<std::byte>(1U << rng() % 8);
    CHECK(tensor.digest(nans) != whole);
  }
}

TEST_CASE("NaNs of a double count as one value", "[exec][digest]") {
  std::mt19937 rng(1);
  const DigestNans nans{8, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000};
  Tensor tensor(rng, {3, 5}, 8);
  const auto with = [&](uint64_t bits) {
    std::memcpy(tensor.memory.data() + 7 * 8, &bits, 8);
    return tensor.digest(nans);
  };
  CHECK(with(0x7FF8000000000000) == with(0xFFF0000000000001));
  CHECK(with(0x7FF8000000000000) != with(0x7FF0000000000000));
}
