#pragma once

#include <bit>
#include <cstring>

#include "boxes/box_copy.h"
#include "boxes/piece.h"
#include "memory/combined.h"

// The operations of a thread on a piece. An op has the sizes of an element on both sides, the elements of a
// full piece, and load() and store(), between which a piece is kept in Held. A piece that is not full is moved
// by store() alone, element by element.

namespace meshcast::cuda {

template <typename T, class Memory>
MESHCAST_HOST_DEVICE T load_element(const Memory& memory, const std::byte* from, int width) {
  const Piece piece = load_piece<static_cast<int>(sizeof(T))>(memory, from, width);
  T out;
  std::memcpy(&out, &piece, sizeof(T));
  return out;
}

template <typename T, class Memory>
MESHCAST_HOST_DEVICE void store_element(const Memory& memory, const T& value, std::byte* to, int width) {
  Piece piece{{0, 0}};
  std::memcpy(&piece, &value, sizeof(T));
  store_piece<static_cast<int>(sizeof(T))>(memory, piece, to, width);
}

// Copies bytes: an "element" is a byte here, so that runs may begin and end anywhere.
struct CopyOp {
  static constexpr int kFromBytes = 1;
  static constexpr int kToBytes = 1;
  static constexpr int kPiece = 16;
  using Held = Piece;

  template <class Memory>
  MESHCAST_HOST_DEVICE void load(const Memory& memory, const BoxCopy& box, const Place& place,
                                 Held* held) const {
    if (place.count == kPiece) {
      *held = load_piece<kPiece>(memory, place.from, box.from_width);
    } else if (place.count == box.tail_width) {  // one access: isolated elements
      *held = load_one(memory, place.from, box.tail_width);
    }
  }

  template <class Memory>
  MESHCAST_HOST_DEVICE void store(const Memory& memory, const BoxCopy& box, const Place& place,
                                  const Held& held) const {
    if (place.count == kPiece) {
      store_piece<kPiece>(memory, held, place.to, box.to_width);
    } else if (place.count == box.tail_width) {
      store_one(memory, held, place.to, box.tail_width);
    } else {
      for (uint32_t at = 0; at < place.count; at += box.tail_width) {
        const Piece part = load_one(memory, place.from + at, box.tail_width);
        store_one(memory, part, place.to + at, box.tail_width);
      }
    }
  }

 private:
  template <class Memory>
  MESHCAST_HOST_DEVICE static Piece load_one(const Memory& memory, const std::byte* from, int width) {
    switch (width) {
      case 8: return load_by<8, 8>(memory, from);
      case 4: return load_by<4, 4>(memory, from);
      case 2: return load_by<2, 2>(memory, from);
      default: return load_by<1, 1>(memory, from);
    }
  }
  template <class Memory>
  MESHCAST_HOST_DEVICE static void store_one(const Memory& memory, const Piece& piece, std::byte* to,
                                             int width) {
    switch (width) {
      case 8: return store_by<8, 8>(memory, piece, to);
      case 4: return store_by<4, 4>(memory, piece, to);
      case 2: return store_by<2, 2>(memory, piece, to);
      default: return store_by<1, 1>(memory, piece, to);
    }
  }
};

// Casts floating-point numbers to another format.
template <typename From, typename To>
struct CastOp {
  static constexpr int kFromBytes = sizeof(From);
  static constexpr int kToBytes = sizeof(To);
  static constexpr int kPiece = 16 / (kFromBytes > kToBytes ? kFromBytes : kToBytes);
  using Held = Piece;

  template <class Memory>
  MESHCAST_HOST_DEVICE void load(const Memory& memory, const BoxCopy& box, const Place& place,
                                 Held* held) const {
    if (place.count == kPiece) *held = load_piece<kPiece * kFromBytes>(memory, place.from, box.from_width);
  }

  template <class Memory>
  MESHCAST_HOST_DEVICE void store(const Memory& memory, const BoxCopy& box, const Place& place,
                                  const Held& held) const {
    if (place.count == kPiece) {
      From in[kPiece];  // NOLINT(*-avoid-c-arrays): registers
      To out[kPiece];   // NOLINT(*-avoid-c-arrays): registers
      std::memcpy(in, &held, sizeof(in));
      MESHCAST_UNROLL
      for (int i = 0; i < kPiece; ++i) round_to(to_float(in[i]), &out[i]);
      Piece piece{{0, 0}};
      std::memcpy(&piece, out, sizeof(out));
      return store_piece<kPiece * kToBytes>(memory, piece, place.to, box.to_width);
    }
    for (uint32_t i = 0; i < place.count; ++i) {
      To out;
      round_to(to_float(load_element<From>(memory, place.from + i * kFromBytes, box.from_width)), &out);
      store_element(memory, out, place.to + i * kToBytes, box.to_width);
    }
  }
};

// to = op(from, to): `to` carries what was reduced so far.
template <typename T>
struct ReduceOpOf {
  static constexpr int kFromBytes = sizeof(T);
  static constexpr int kToBytes = sizeof(T);
  static constexpr int kPiece = 16 / kFromBytes;
  struct Held {
    Piece own;
    Piece carried;
  };

  ReduceOp op;

  template <class Memory>
  MESHCAST_HOST_DEVICE void load(const Memory& memory, const BoxCopy& box, const Place& place,
                                 Held* held) const {
    if (place.count != kPiece) return;
    held->own = load_piece<16>(memory, place.from, box.from_width);
    held->carried = load_piece<16>(memory, place.to, box.to_width);
  }

  template <class Memory>
  MESHCAST_HOST_DEVICE void store(const Memory& memory, const BoxCopy& box, const Place& place,
                                  const Held& held) const {
    if (place.count == kPiece) {
      T own[kPiece];      // NOLINT(*-avoid-c-arrays): registers
      T carried[kPiece];  // NOLINT(*-avoid-c-arrays): registers
      std::memcpy(own, &held.own, sizeof(own));
      std::memcpy(carried, &held.carried, sizeof(carried));
      MESHCAST_UNROLL
      for (int i = 0; i < kPiece; ++i) carried[i] = combine(own[i], carried[i]);
      Piece piece;
      std::memcpy(&piece, carried, sizeof(carried));
      return store_piece<16>(memory, piece, place.to, box.to_width);
    }
    for (uint32_t i = 0; i < place.count; ++i) {
      const T own = load_element<T>(memory, place.from + i * kFromBytes, box.from_width);
      std::byte* const at = place.to + i * kToBytes;
      store_element(memory, combine(own, load_element<T>(memory, at, box.to_width)), at, box.to_width);
    }
  }

 private:
  MESHCAST_HOST_DEVICE T combine(T own, T carried) const {
    switch (op) {
      case ReduceOp::Min: return combined<ReduceOp::Min>(own, carried);
      case ReduceOp::Max: return combined<ReduceOp::Max>(own, carried);
      case ReduceOp::Product: return combined<ReduceOp::Product>(own, carried);
      default: return combined<ReduceOp::Sum>(own, carried);
    }
  }
};

// The end of an average, in place: from and to are the same.
template <typename T>
struct DivideOp {
  static constexpr int kFromBytes = sizeof(T);
  static constexpr int kToBytes = sizeof(T);
  static constexpr int kPiece = 16 / kFromBytes;
  using Held = Piece;

  int64_t count;

  template <class Memory>
  MESHCAST_HOST_DEVICE void load(const Memory& memory, const BoxCopy& box, const Place& place,
                                 Held* held) const {
    if (place.count == kPiece) *held = load_piece<16>(memory, place.from, box.from_width);
  }

  template <class Memory>
  MESHCAST_HOST_DEVICE void store(const Memory& memory, const BoxCopy& box, const Place& place,
                                  const Held& held) const {
    if (place.count == kPiece) {
      T value[kPiece];  // NOLINT(*-avoid-c-arrays): registers
      std::memcpy(value, &held, sizeof(value));
      MESHCAST_UNROLL
      for (int i = 0; i < kPiece; ++i) value[i] = divided(value[i], count);
      Piece piece;
      std::memcpy(&piece, value, sizeof(value));
      return store_piece<16>(memory, piece, place.to, box.to_width);
    }
    for (uint32_t i = 0; i < place.count; ++i) {
      const T value = load_element<T>(memory, place.from + i * kFromBytes, box.from_width);
      store_element(memory, divided(value, count), place.to + i * kToBytes, box.to_width);
    }
  }
};

}  // namespace meshcast::cuda
