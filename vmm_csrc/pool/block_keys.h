// Computes block keys from tokens: 128 bits each, chained from block to block.
//
//   key of block i = mix(key of block i - 1, the tokens of block i);   before the first: the seed
//
// A key therefore stands for all tokens up to the end of its block, and a longer prompt can be
// continued from any key. The seed of a prompt is the fingerprint of its namespace, so namespaces
// share no key.
//
// This is not a cryptographic hash. If two prompts had the same key, each could be served the KV of
// the other: wrong output, and a leak between users. An accidental collision takes about 2^64
// blocks in one namespace, but a user who chooses tokens may construct one. Where users do not
// trust each other, keys are made from the engine's SHA-256 hashes (Namespace.key_of). This
// function is for engines without such hashes.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvelastic {

/// A key, least significant byte first. All zeros: not a valid key.
struct BlockKey {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  static constexpr std::size_t kBytes = 16;
  friend bool operator==(const BlockKey&, const BlockKey&) = default;
  bool is_none() const { return (low | high) == 0; }

  /// Pre: 16 bytes are readable.
  static BlockKey load(const void* bytes) {
    BlockKey key;
    std::memcpy(&key, bytes, kBytes);
    return key;
  }
  void store(void* bytes) const { std::memcpy(bytes, this, kBytes); }
};
static_assert(sizeof(BlockKey) == BlockKey::kBytes && std::endian::native == std::endian::little);

/// XOR of both halves of the 128-bit product: each bit depends on all bits of both factors.
inline std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

/// The key of the block that follows `before` and holds `tokens`. Always valid.
BlockKey next_block_key(BlockKey before, std::span<const std::int64_t> tokens);

/// Computes the keys of the whole blocks; a remainder of `tokens` has none. `keys` has 16 bytes per
/// block. Pre: block_tokens > 0.
void block_keys(std::span<const std::int64_t> tokens, std::size_t block_tokens, BlockKey seed,
                std::span<std::byte> keys);

}  // namespace kvelastic
