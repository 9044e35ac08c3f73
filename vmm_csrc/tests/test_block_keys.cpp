// Keys of blocks: what they depend on, and that they do not repeat.
#include <bit>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "pool/block_keys.h"

namespace kvelastic {
namespace {

constexpr BlockKey kSeed{0x1234567890ABCDEFu, 0xFEDCBA0987654321u};

std::vector<BlockKey> keys_of(const std::vector<std::int64_t>& tokens, std::size_t block_tokens,
                              BlockKey seed = kSeed) {
  std::vector<BlockKey> keys(tokens.size() / block_tokens);
  block_keys(tokens, block_tokens, seed, std::as_writable_bytes(std::span(keys)));
  return keys;
}

std::vector<std::int64_t> counted(std::size_t count) {
  std::vector<std::int64_t> tokens(count);
  for (std::size_t i = 0; i < count; ++i) tokens[i] = static_cast<std::int64_t>(i);
  return tokens;
}

int bits_between(const BlockKey& a, const BlockKey& b) {
  return std::popcount(a.low ^ b.low) + std::popcount(a.high ^ b.high);
}

}  // namespace

TEST(block_keys_cover_all_preceding_tokens) {
  const std::vector<std::int64_t> tokens = counted(64);
  const std::vector<BlockKey> keys = keys_of(tokens, 16);
  REQUIRE(keys.size() == 4);
  for (std::size_t changed = 0; changed < tokens.size(); ++changed) {
    std::vector<std::int64_t> other = tokens;
    other[changed] += 1;
    const std::vector<BlockKey> theirs = keys_of(other, 16);
    for (std::size_t block = 0; block < keys.size(); ++block) {
      CHECK((keys[block] == theirs[block]) == (block < changed / 16));
    }
  }
}

TEST(any_block_key_can_seed_the_next) {
  const std::vector<std::int64_t> tokens = counted(64);
  const std::vector<BlockKey> keys = keys_of(tokens, 16);
  const std::vector<std::int64_t> rest(tokens.begin() + 32, tokens.end());
  const std::vector<BlockKey> tail = keys_of(rest, 16, keys[1]);
  CHECK(tail[0] == keys[2]);
  CHECK(tail[1] == keys[3]);
}

TEST(partial_block_has_no_key) {
  CHECK(keys_of(counted(15), 16).empty());
  CHECK(keys_of(counted(31), 16) == keys_of(counted(16), 16));
}

TEST(block_keys_of_zeros_differ_by_length) {
  std::set<std::pair<std::uint64_t, std::uint64_t>> seen;
  for (std::size_t length = 1; length <= 64; ++length) {
    const std::vector<std::int64_t> zeros(length, 0);
    const BlockKey key = keys_of(zeros, length)[0];
    CHECK(!key.is_none());
    CHECK(seen.insert({key.low, key.high}).second);
  }
}

TEST(every_input_bit_changes_half_the_key) {
  const std::vector<std::int64_t> tokens = counted(16);
  const BlockKey key = keys_of(tokens, 16)[0];
  double sum = 0;
  int looked_at = 0;
  const auto look = [&](const BlockKey& other) {
    const int bits = bits_between(key, other);
    CHECK(bits > 32 && bits < 96);
    sum += bits;
    ++looked_at;
  };
  for (std::size_t at = 0; at < tokens.size(); ++at) {
    for (int bit = 0; bit < 64; ++bit) {
      std::vector<std::int64_t> other = tokens;
      other[at] ^= std::int64_t{1} << bit;
      look(keys_of(other, 16)[0]);
    }
  }
  for (int bit = 0; bit < 64; ++bit) {
    look(keys_of(tokens, 16, {kSeed.low ^ (std::uint64_t{1} << bit), kSeed.high})[0]);
    look(keys_of(tokens, 16, {kSeed.low, kSeed.high ^ (std::uint64_t{1} << bit)})[0]);
  }
  CHECK(sum / looked_at > 63 && sum / looked_at < 65);
}

TEST(keys_of_small_tokens_differ_in_each_half) {
  std::set<std::uint64_t> low, high;
  BlockKey key = kSeed;
  for (std::int64_t i = 0; i < 200'000; ++i) {
    const std::int64_t tokens[2] = {i & 3, i >> 2 & 1};
    key = next_block_key(key, tokens);
    low.insert(key.low);
    high.insert(key.high);
  }
  CHECK(low.size() == 200'000);
  CHECK(high.size() == 200'000);
}

TEST(zero_factor_does_not_mask_the_other_token) {
  // The first token makes one factor of the first product zero; see absorb().
  const auto zeroing = static_cast<std::int64_t>(kSeed.low ^ 0x6A09E667F3BCC909u);
  std::set<std::uint64_t> seen;
  for (std::int64_t other = 0; other < 1000; ++other) {
    const std::int64_t tokens[2] = {zeroing, other};
    CHECK(seen.insert(next_block_key(kSeed, tokens).low).second);
  }
}

}  // namespace kvelastic
