#include "pool/block_keys.h"

#include <bit>

namespace kvelastic {
namespace {

// Odd constants with about as many ones as zeros: the first 64 fractional bits of sqrt(2), sqrt(3),
// sqrt(5) and sqrt(7), made odd.
constexpr std::uint64_t kRoot2 = 0x6A09E667F3BCC909u;
constexpr std::uint64_t kRoot3 = 0xBB67AE8584CAA73Bu;
constexpr std::uint64_t kRoot5 = 0x3C6EF372FE94F82Bu;
constexpr std::uint64_t kRoot7 = 0xA54FF53A5F1D36F1u;

__extension__ using Wide = unsigned __int128;

/// Absorbs two tokens. Besides the product, each half keeps its state and adds the other token. So
/// a factor of zero, which an attacker could choose, loses no state.
inline void absorb(BlockKey& state, std::uint64_t first, std::uint64_t second) {
  const Wide product =
      static_cast<Wide>(state.low ^ first ^ kRoot2) * (state.high ^ second ^ kRoot3);
  state.low = (std::rotl(state.low, 23) + second * kRoot5) ^ static_cast<std::uint64_t>(product);
  state.high =
      (std::rotl(state.high, 41) + first * kRoot7) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

BlockKey next_block_key(BlockKey before, std::span<const std::int64_t> tokens) {
  BlockKey state = before;
  std::size_t at = 0;
  for (; at + 1 < tokens.size(); at += 2) {
    absorb(state, static_cast<std::uint64_t>(tokens[at]),
           static_cast<std::uint64_t>(tokens[at + 1]));
  }
  if (at < tokens.size()) absorb(state, static_cast<std::uint64_t>(tokens[at]), 0);
  // Absorbs the number of tokens: an odd sequence must differ from itself plus a token 0.
  absorb(state, tokens.size(), kRoot7);
  const BlockKey mixed{fold(state.low ^ kRoot5, state.high ^ kRoot2),
                       fold(state.low ^ kRoot7, std::rotl(state.high, 32) ^ kRoot3)};
  BlockKey key{mixed.low + state.high, mixed.high + state.low};
  if (key.is_none()) key.low = 1;
  return key;
}

void block_keys(std::span<const std::int64_t> tokens, std::size_t block_tokens, BlockKey seed,
                std::span<std::byte> keys) {
  BlockKey key = seed;
  const std::size_t blocks = tokens.size() / block_tokens;
  for (std::size_t block = 0; block < blocks; ++block) {
    key = next_block_key(key, tokens.subspan(block * block_tokens, block_tokens));
    key.store(keys.data() + block * BlockKey::kBytes);
  }
}

}  // namespace kvelastic
