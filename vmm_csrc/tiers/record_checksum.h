// A 64-bit checksum of a record, seeded with its key: the bytes of another key's record differ.
//
// Four lanes fold products of 64 x 64 bits; portable, and faster than any disk on one core. It
// finds damage. It is no authentication: who can write a record can write its checksum.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvelastic {

using RecordKey = std::array<std::byte, 16>;

namespace checksum_detail {

__extension__ using Wide = unsigned __int128;

// Bits of the fractions of square roots of primes: odd, and about half of their bits are set.
inline constexpr std::array<std::uint64_t, 6> kMix = {0x6A09E667F3BCC909u, 0xBB67AE8584CAA73Bu,
                                                      0x3C6EF372FE94F82Bu, 0xA54FF53A5F1D36F1u,
                                                      0x510E527FADE682D1u, 0x9B05688C2B3E6C1Fu};

constexpr std::uint64_t fold(std::uint64_t left, std::uint64_t right) {
  const Wide product = static_cast<Wide>(left) * right;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

/// Of a file, which little-endian machines share.
inline std::uint64_t word_at(const std::byte* at) {
  std::uint64_t word = 0;
  std::memcpy(&word, at, sizeof word);
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap64(word);
  return word;
}

/// The rotated lane is added, so that a product of zero does not forget what came before.
inline std::uint64_t step(std::uint64_t lane, const std::byte* at, std::size_t mix) {
  return std::rotl(lane, 23) +
         fold(word_at(at) ^ lane ^ kMix[mix], word_at(at + 8) ^ kMix[mix + 1]);
}

}  // namespace checksum_detail

inline std::uint64_t record_checksum(std::span<const std::byte> bytes, const RecordKey& key) {
  using namespace checksum_detail;
  constexpr std::size_t kStride = 64;
  constexpr std::size_t kLane = 16;
  const std::uint64_t seed =
      checksum_detail::fold(word_at(key.data()) ^ kMix[0], word_at(key.data() + 8) ^ kMix[1]);
  std::array<std::uint64_t, 4> lanes = {seed, seed ^ kMix[2], seed ^ kMix[3], seed ^ kMix[4]};
  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= kStride; left -= kStride, at += kStride) {
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
      lanes[lane] = step(lanes[lane], at + lane * kLane, lane);
    }
  }
  std::array<std::byte, kStride> tail{};
  if (left > 0) std::memcpy(tail.data(), at, left);
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
    lanes[lane] = step(lanes[lane], tail.data() + lane * kLane, lane + 1);
  }
  const std::uint64_t low =
      checksum_detail::fold(lanes[0] ^ kMix[5], std::rotl(lanes[1], 31) ^ kMix[4]);
  const std::uint64_t high =
      checksum_detail::fold(lanes[2] ^ kMix[3], std::rotl(lanes[3], 17) ^ kMix[2]);
  return checksum_detail::fold(low ^ bytes.size(), high ^ kMix[0]) ^ low ^ std::rotl(high, 32);
}

}  // namespace kvelastic
