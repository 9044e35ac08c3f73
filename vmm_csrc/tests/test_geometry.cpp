// Geometry::check under the undefined-behaviour sanitizer: whatever it accepts can be computed
// with.
#include <random>

#include "check.h"
#include "pages/geometry.h"

namespace kvelastic {

TEST(geometry_check_refuses_overflow) {
  std::mt19937_64 random(7);
  const auto odd = [&] {
    const std::uint64_t power = std::uint64_t{1} << (random() % 64);
    return power + random() % 3 - 1;
  };
  constexpr std::uint64_t kGranularity = std::uint64_t{2} << 20;
  int accepted = 0;
  for (int i = 0; i < 300'000; ++i) {
    Geometry g;
    g.pages = odd() >> (random() % 40);
    g.extents_per_page = random() % 2 == 0 ? 1 : odd();
    g.extent_bytes = kGranularity * (random() % 2 == 0 ? 1 + random() % 8 : odd());
    g.extent_stride_bytes = random() % 2 == 0 ? g.pages * g.extent_bytes : kGranularity * odd();
    g.block_bytes = odd() >> (random() % 30);
    g.blocks_per_page = random() % 2 == 0 ? 1 + random() % 64 : odd();
    if (!g.check(kGranularity)) continue;
    ++accepted;
    using Wide = __uint128_t;
    const Wide last_extent =
        Wide{g.extents_per_page - 1} * (g.extents_per_page > 1 ? g.extent_stride_bytes : 0);
    CHECK(Wide{g.range_bytes()} == last_extent + Wide{g.pages} * g.extent_bytes);
    CHECK(Wide{g.page_bytes()} == Wide{g.extents_per_page} * g.extent_bytes);
    for (const std::uint64_t page : {std::uint64_t{0}, g.pages / 2, g.pages - 1}) {
      const auto index = static_cast<PageIndex>(page);
      const Wide begin = Wide{page} * g.extent_bytes;
      const Wide first = Wide{static_cast<std::uint64_t>(g.first_id(index))} * g.block_bytes;
      CHECK(first >= begin && first < begin + g.block_bytes);
      CHECK(first + Wide{g.blocks_per_page} * g.block_bytes <= begin + g.extent_bytes);
      CHECK(Wide{g.extent_offset(index, g.extents_per_page - 1)} + g.extent_bytes <=
            Wide{g.range_bytes()});
    }
  }
  CHECK(accepted > 1000);
}

}  // namespace kvelastic
