// Buckets against a plain list: the same first page for every question, at sizes that need one
// word, several words, and several words of summary.
#include <algorithm>
#include <deque>
#include <map>
#include <random>

#include "check.h"
#include "pool/buckets.h"

namespace kvelastic {
namespace {

struct Model {
  std::map<std::uint32_t, std::deque<PageIndex>> lists;

  void push_back(PageIndex page, std::uint32_t value) { lists[value].push_back(page); }
  void remove(PageIndex page, std::uint32_t value) {
    std::deque<PageIndex>& list = lists[value];
    list.erase(std::find(list.begin(), list.end(), page));
    if (list.empty()) lists.erase(value);
  }
  std::optional<PageIndex> lowest_from(std::uint32_t value) const {
    const auto at = lists.lower_bound(value);
    return at == lists.end() ? std::nullopt : std::optional(at->second.front());
  }
  std::optional<PageIndex> highest() const {
    return lists.empty() ? std::nullopt : std::optional(lists.rbegin()->second.front());
  }
};

void compare(std::uint32_t max_value, std::uint32_t seed) {
  constexpr PageIndex kPages = 40;
  Buckets buckets;
  CHECK(static_cast<bool>(buckets.allocate(kPages, max_value)));
  Model model;
  std::mt19937 random(seed);
  std::map<PageIndex, std::uint32_t> where;
  for (int step = 0; step < 4000; ++step) {
    const auto page = static_cast<PageIndex>(random() % kPages);
    if (const auto at = where.find(page); at != where.end()) {
      buckets.remove(page, at->second);
      model.remove(page, at->second);
      where.erase(at);
    } else {
      // Half of the values at the edges of words, where an off-by-one would be.
      auto value = static_cast<std::uint32_t>(random() % (max_value + 1));
      if (random() % 2 == 0) {
        value = std::min<std::uint32_t>(max_value, value / 64 * 64 + (random() % 2 == 0 ? 0 : 63));
      }
      buckets.push_back(page, value);
      model.push_back(page, value);
      where[page] = value;
    }
    for (const std::uint32_t from : {0U, 1U, 63U, 64U, 4095U, 4096U, max_value, max_value + 1,
                                     1U + static_cast<std::uint32_t>(random()) % max_value}) {
      CHECK(buckets.lowest_from(from) == model.lowest_from(from));
    }
    CHECK(buckets.highest() == model.highest());
  }
}

}  // namespace

TEST(buckets_match_a_plain_list) {
  std::uint32_t seed = 1;
  for (const std::uint32_t max_value : {1U, 8U, 63U, 64U, 70U, 4095U, 4096U, 70000U, 1U << 20}) {
    compare(max_value, seed++);
  }
}

}  // namespace kvelastic
