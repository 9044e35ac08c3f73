#include "pool/block_keys.h"

#include <bit>

namespace kvelastic {
namespace {

// Odd, with about as many ones as zeros, and unlike each other: the first 64 bits behind the point
// of sqrt(2), sqrt(3), sqrt(5) and sqrt(7), each made odd.
constexpr std::uint64_t kRoot2 = 0x6A09E667F3BCC909u;
constexpr std::uint64_t kRoot3 = 0xBB67AE8584CAA73Bu;
constexpr std::uint64_t kRoot5 = 0x3C6EF372FE94F82Bu;
constexpr std::uint64_t kRoot7 = 0xA54FF53A5F1D36F1u;

__extension__ using Wide = unsigned __int128;

/// Takes two tokens in. Beside the product each half keeps what it was and gets the other token, so
/// that a factor of zero, which an input can be chosen for, does not forget anything.
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
  // The number of tokens: an odd one and the same with a token 0 more must differ.
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
