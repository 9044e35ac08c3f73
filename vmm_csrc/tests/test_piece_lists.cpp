// Lists of pieces: cut into portions, and sorted by range.
#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "transfer/piece_lists.h"

namespace kvelastic {
namespace {

/// Adjoining pieces of `bytes` in all, some of them empty, from this address on.
std::vector<Piece> random_pieces(std::uint64_t address, std::uint64_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Piece> pieces;
  for (const std::uint64_t end = address + bytes; address < end; address += pieces.back().bytes) {
    pieces.push_back({address, std::min<std::uint64_t>(random() % 40, end - address)});
  }
  return pieces;
}

/// Where each byte lies, in order.
std::vector<std::uint64_t> bytes_named(const std::vector<Piece>& pieces) {
  std::vector<std::uint64_t> named;
  for (const Piece& each : pieces) {
    for (std::uint64_t at = 0; at < each.bytes; ++at) named.push_back(each.address + at);
  }
  return named;
}

TEST(portions_cover_all_bytes_within_limits) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    const std::uint64_t bytes = seed * 31;
    const auto from = random_pieces(1000, bytes, seed), to = random_pieces(90'000, bytes, seed + 1);
    const std::size_t most_pieces = 1 + seed % 7;
    const std::uint64_t most_bytes = 1 + seed % 3 * 50;
    auto portions = portions_of(from, to, most_pieces, most_bytes);
    REQUIRE(bool(portions));
    std::vector<std::uint64_t> sources, targets;
    for (const Portion& each : *portions) {
      CHECK(each.bytes > 0 && each.bytes <= most_bytes);
      CHECK(each.from.size() <= most_pieces && each.to.size() <= most_pieces);
      const auto some = bytes_named(each.from), others = bytes_named(each.to);
      CHECK(some.size() == each.bytes && others.size() == each.bytes);
      sources.insert(sources.end(), some.begin(), some.end());
      targets.insert(targets.end(), others.begin(), others.end());
    }
    CHECK(sources == bytes_named(from) && targets == bytes_named(to));
  }
}

TEST(copy_within_limits_is_one_portion) {
  const std::vector<Piece> from{{10, 5}, {20, 5}}, to{{50, 10}};
  auto portions = portions_of(from, to, 2, 10);
  CHECK(portions && portions->size() == 1 && portions->front().from.size() == 2);
  CHECK(portions_of({}, {}, 1, 1)->empty());
}

TEST(portions_with_different_sizes_are_refused) {
  const std::vector<Piece> from{{10, 5}}, to{{50, 6}}, beyond{{~std::uint64_t{0}, 2}};
  CHECK(portions_of(from, to, 1, 1).error().code == Errc::kInvalidArgument);
  CHECK(portions_of(beyond, to, 1, 1).error().code == Errc::kInvalidArgument);
  CHECK(portions_of(to, beyond, 1, 1).error().code == Errc::kInvalidArgument);
}

TEST(pieces_are_sorted_by_containing_range) {
  const std::vector<std::uint64_t> starts{100, 200, 400}, ends{200, 300, 500};
  const std::vector<Piece> pieces{{250, 50}, {100, 100}, {200, 1}, {499, 1}, {300, 0}, {199, 1}};
  auto found = pieces_by_range(pieces, starts, ends);
  REQUIRE(found && found->size() == 3);
  CHECK((*found)[0].range == 1 && (*found)[0].pieces.size() == 3);
  CHECK((*found)[1].range == 0 && (*found)[1].pieces.size() == 2);
  CHECK((*found)[2].range == 2 && (*found)[2].pieces.size() == 1);
  for (const Piece bad : {Piece{99, 1}, Piece{199, 2}, Piece{300, 1}, Piece{399, 2}, Piece{500, 1},
                          Piece{450, ~std::uint64_t{0}}, Piece{~std::uint64_t{0}, 1}}) {
    const std::vector<Piece> one{{100, 1}, bad};
    CHECK(pieces_by_range(one, starts, ends).error().code == Errc::kNotRegistered);
  }
  CHECK(pieces_by_range(pieces, {}, {}).error().code == Errc::kNotRegistered);
  CHECK(pieces_by_range({}, starts, ends)->empty());
}

}  // namespace
}  // namespace kvelastic
