// Keys of blocks from their tokens: 128 bits each, and each made of the one before it.
//
//   key of block i = mix(key of block i - 1, the tokens of block i);   before the first: the seed
//
// So a key stands for all tokens up to the end of its block, and any key can be the seed with which
// a longer prompt is continued. The seed of a prompt is the fingerprint of its namespace: two
// namespaces share no key.
//
// This is not a cryptographic hash. Two different prompts with one key would be served each other's
// KV: wrong answers, and what one user wrote in another one's context. By accident that needs about
// 2^64 blocks in one namespace. Whoever can choose tokens *and* wants it may well construct a
// collision, so where users do not trust each other the keys are made of the engine's SHA-256
// hashes (Namespace.key_of), and this is for engines that have none.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvelastic {

/// A key as it lies in memory, least significant byte first. All zeros: the key of no block.
struct BlockKey {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  static constexpr std::size_t kBytes = 16;
  friend bool operator==(const BlockKey&, const BlockKey&) = default;
  bool is_none() const { return (low | high) == 0; }

  /// Pre: 16 bytes are there.
  static BlockKey load(const void* bytes) {
    BlockKey key;
    std::memcpy(&key, bytes, kBytes);
    return key;
  }
  void store(void* bytes) const { std::memcpy(bytes, this, kBytes); }
};
static_assert(sizeof(BlockKey) == BlockKey::kBytes && std::endian::native == std::endian::little);

/// Both halves of the 128-bit product, added up without carry: each bit of it depends on all of
/// both factors.
inline std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

/// The key of the block that follows `before` and holds `tokens`. Never the key of no block.
BlockKey next_block_key(BlockKey before, std::span<const std::int64_t> tokens);

/// The keys of all whole blocks; what remains of `tokens` has none. `keys` has 16 bytes for each.
/// Pre: block_tokens > 0.
void block_keys(std::span<const std::int64_t> tokens, std::size_t block_tokens, BlockKey seed,
                std::span<std::byte> keys);

}  // namespace kvelastic
