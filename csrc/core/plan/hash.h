#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace meshcast {

// 128-bit digest by which ranks compare plans. Not cryptographic: it finds disagreement, not attacks.
class Hasher {
 public:
  void add(int64_t value) {
    a_ = mix(a_ ^ static_cast<uint64_t>(value));
    b_ = mix(b_ + static_cast<uint64_t>(value) * 0x9e3779b97f4a7c15u + 1);
  }
  template <typename T>
  void add(const std::vector<T>& values) {
    add(static_cast<int64_t>(values.size()));
    for (const T& value : values) add(static_cast<int64_t>(value));
  }

  uint64_t word() const { return a_ ^ b_; }
  std::string hex() const {  // 32 digits
    static const char digits[] = "0123456789abcdef";
    std::string out;
    for (const uint64_t half : {a_, b_}) {
      for (int shift = 60; shift >= 0; shift -= 4) out += digits[(half >> shift) & 15];
    }
    return out;
  }

 private:
  // A bijection that spreads every input bit over the word.
  static uint64_t mix(uint64_t x) {
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93u;
    return x ^ (x >> 32);
  }

  uint64_t a_ = 0x243f6a8885a308d3u;
  uint64_t b_ = 0x13198a2e03707344u;
};

}  // namespace meshcast
