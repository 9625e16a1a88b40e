#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "common/host_device.h"

namespace meshcast::cuda {

static_assert(std::endian::native == std::endian::little, "pieces are put together from narrower accesses");

// Up to 16 bytes in registers, the widest access.
struct alignas(16) Piece {
  uint64_t words[2];  // NOLINT(*-avoid-c-arrays): a register pair
};

template <int kBytes>
struct Unsigned;
template <>
struct Unsigned<1> {
  using Type = uint8_t;
};
template <>
struct Unsigned<2> {
  using Type = uint16_t;
};
template <>
struct Unsigned<4> {
  using Type = uint32_t;
};
template <>
struct Unsigned<8> {
  using Type = uint64_t;
};

// A kernel's access to memory. Tests use one that checks every access instead.
struct DeviceMemory {
  template <typename T>
  MESHCAST_HOST_DEVICE T load(const std::byte* from) const {
    return *reinterpret_cast<const T*>(from);
  }
  template <typename T>
  MESHCAST_HOST_DEVICE void store(std::byte* to, const T& value) const {
    *reinterpret_cast<T*>(to) = value;
  }
};

// kBytes by accesses of kWidth bytes each. All loops have fixed lengths, so that a piece stays in registers.
template <int kBytes, int kWidth, class Memory>
MESHCAST_HOST_DEVICE Piece load_by(const Memory& memory, const std::byte* from) {
  if constexpr (kWidth == 16) {
    return memory.template load<Piece>(from);
  } else {
    Piece piece{{0, 0}};
    for (int at = 0; at < kBytes; at += kWidth) {
      using Word = typename Unsigned<kWidth>::Type;
      piece.words[at / 8] |= uint64_t{memory.template load<Word>(from + at)} << 8 * (at % 8);
    }
    return piece;
  }
}

template <int kBytes, int kWidth, class Memory>
MESHCAST_HOST_DEVICE void store_by(const Memory& memory, const Piece& piece, std::byte* to) {
  if constexpr (kWidth == 16) {
    memory.template store<Piece>(to, piece);
  } else {
    for (int at = 0; at < kBytes; at += kWidth) {
      using Word = typename Unsigned<kWidth>::Type;
      memory.template store<Word>(to + at, static_cast<Word>(piece.words[at / 8] >> 8 * (at % 8)));
    }
  }
}

// `width` is the widest aligned access, the same for all threads of a block. It may be more than kBytes.
template <int kBytes, class Memory>
MESHCAST_HOST_DEVICE Piece load_piece(const Memory& memory, const std::byte* from, int width) {
  if constexpr (kBytes >= 16) {
    if (width >= 16) return load_by<kBytes, 16>(memory, from);
  }
  if constexpr (kBytes >= 8) {
    if (width >= 8) return load_by<kBytes, 8>(memory, from);
  }
  if constexpr (kBytes >= 4) {
    if (width >= 4) return load_by<kBytes, 4>(memory, from);
  }
  if constexpr (kBytes >= 2) {
    if (width >= 2) return load_by<kBytes, 2>(memory, from);
  }
  return load_by<kBytes, 1>(memory, from);
}

template <int kBytes, class Memory>
MESHCAST_HOST_DEVICE void store_piece(const Memory& memory, const Piece& piece, std::byte* to, int width) {
  if constexpr (kBytes >= 16) {
    if (width >= 16) return store_by<kBytes, 16>(memory, piece, to);
  }
  if constexpr (kBytes >= 8) {
    if (width >= 8) return store_by<kBytes, 8>(memory, piece, to);
  }
  if constexpr (kBytes >= 4) {
    if (width >= 4) return store_by<kBytes, 4>(memory, piece, to);
  }
  if constexpr (kBytes >= 2) {
    if (width >= 2) return store_by<kBytes, 2>(memory, piece, to);
  }
  return store_by<kBytes, 1>(memory, piece, to);
}

}  // namespace meshcast::cuda
