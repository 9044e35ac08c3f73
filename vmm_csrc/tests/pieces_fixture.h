// Memory with contents, and ways to cut it into pieces; shared by the tests of copies.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <vector>

#include "../pieces.h"

namespace kvelastic {

inline PieceDeadline soon() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(60);
}

inline std::uint64_t address_of(const std::byte* byte) {
  return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(byte));
}

inline std::vector<std::byte> noise(std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> made(bytes);
  for (std::byte& one : made) one = static_cast<std::byte>(random());
  return made;
}

/// The memory in pieces of any size, some of them empty, in order.
inline std::vector<Piece> cut(const std::vector<std::byte>& memory, std::size_t most,
                              unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Piece> pieces;
  for (std::size_t at = 0; at < memory.size();) {
    const std::size_t bytes = std::min<std::size_t>(random() % most, memory.size() - at);
    pieces.push_back({address_of(memory.data() + at), bytes});
    at += bytes;
  }
  return pieces;
}

}  // namespace kvelastic
