// Pages sorted by a small number; finds the smallest value >= k without scanning pages.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/lazy_array.h"
#include "pages/geometry.h"

namespace kvelastic {

/// A FIFO list of pages for each value 0..max_value. Every operation is O(1) in the number of
/// pages: a bitmap of non-empty lists with a summary of its words finds a list in a few
/// instructions for up to 4096 values, plus one word for each further 4096.
class Buckets {
 public:
  Status allocate(std::size_t pages, std::uint32_t max_value) {
    heads_.assign(max_value + 1, kNone);
    words_.assign(max_value / 64 + 1, 0);
    summary_.assign(words_.size() / 64 + 1, 0);
    return links_.allocate(pages);
  }

  /// Pre: the page is in no list.
  void push_back(PageIndex page, std::uint32_t value) {
    PageIndex& head = heads_[value];
    if (head == kNone) {
      head = page;
      links_[page] = {page, page};
      words_[value / 64] |= bit(value);
      summary_[value / 4096] |= bit(value / 64);
      return;
    }
    const PageIndex tail = links_[head].previous;
    links_[page] = {tail, head};
    links_[tail].next = page;
    links_[head].previous = page;
  }

  /// Pre: the page is in the list of `value`.
  void remove(PageIndex page, std::uint32_t value) {
    const Link link = links_[page];
    if (link.next == page) {
      heads_[value] = kNone;
      words_[value / 64] &= ~bit(value);
      if (words_[value / 64] == 0) summary_[value / 4096] &= ~bit(value / 64);
      return;
    }
    links_[link.previous].next = link.next;
    links_[link.next].previous = link.previous;
    if (heads_[value] == page) heads_[value] = link.next;
  }

  /// The first page of the lowest non-empty list whose value is at least `value`.
  std::optional<PageIndex> lowest_from(std::uint32_t value) const {
    if (value >= heads_.size()) return std::nullopt;
    std::size_t word = value / 64;
    if (const std::uint64_t rest = words_[word] >> (value % 64); rest != 0) {
      return heads_[value + std::countr_zero(rest)];
    }
    if (++word >= words_.size()) return std::nullopt;
    std::uint64_t above = summary_[word / 64] & (~std::uint64_t{0} << (word % 64));
    for (std::size_t s = word / 64;;) {
      if (above != 0) {
        word = s * 64 + std::countr_zero(above);
        return heads_[word * 64 + std::countr_zero(words_[word])];
      }
      if (++s >= summary_.size()) return std::nullopt;
      above = summary_[s];
    }
  }

  /// The first page of the highest non-empty list.
  std::optional<PageIndex> highest() const {
    for (std::size_t s = summary_.size(); s-- > 0;) {
      if (summary_[s] == 0) continue;
      const std::size_t word = s * 64 + 63 - std::countl_zero(summary_[s]);
      return heads_[word * 64 + 63 - std::countl_zero(words_[word])];
    }
    return std::nullopt;
  }

 private:
  struct Link {
    PageIndex previous;
    PageIndex next;
  };
  static constexpr PageIndex kNone = ~PageIndex{0};
  static std::uint64_t bit(std::uint64_t value) { return std::uint64_t{1} << (value % 64); }

  std::vector<PageIndex> heads_;
  std::vector<std::uint64_t> words_;    // bit v: list v is not empty
  std::vector<std::uint64_t> summary_;  // bit w: words_[w] is not zero
  LazyArray<Link> links_;
};

}  // namespace kvelastic
