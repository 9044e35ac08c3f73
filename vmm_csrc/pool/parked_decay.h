// When parked pages are unmapped: half of them after one step, the rest depending on allocs. Pure:
// the caller passes the time. Used by the maintenance thread.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <numeric>

#include "pool/provisioning.h"

namespace kvelastic {

class ParkedDecay {
 public:
  using Time = std::chrono::steady_clock::time_point;
  /// Steps after which an idle pool has no parked page.
  static constexpr unsigned kSteps = 5;

  explicit ParkedDecay(std::chrono::nanoseconds idle_trim) : step_(idle_trim / kSteps) {}

  bool is_running() const { return due_ != Time::max(); }
  /// When the next step is due; Time::max(): never.
  Time due() const { return due_; }

  /// Starts when pages are parked or cached blocks can be compacted. Earlier use counts as use in
  /// the last step.
  void begin(Time now, const ParkedUse& before, std::uint64_t activity) {
    taken_.fill(0);
    taken_[0] = before.taken_pages;
    at_ = 1;
    kept_ = 0;
    quiet_ = 0;
    activity_ = activity;
    due_ = now + step_;
  }
  void end() { due_ = Time::max(); }

  /// At the end of a step: true if the pool had no alloc and no free for kSteps steps.
  bool is_idle(std::uint64_t activity) {
    quiet_ = activity == activity_ ? quiet_ + 1 : 0;
    activity_ = activity;
    return quiet_ >= kSteps;
  }

  /// Ends a step and returns how many pages to unmap. Half of the pages that were parked for the
  /// whole step stay for the next one, but at most as many as allocs took in the last kSteps steps.
  std::uint64_t step(Time now, const ParkedUse& use) {
    taken_[at_++ % kSteps] = use.taken_pages;
    const std::uint64_t expected = std::accumulate(taken_.begin(), taken_.end(), std::uint64_t{0});
    const std::uint64_t halved = std::min(use.unneeded_pages, kept_);
    kept_ = std::min(halved + (use.unneeded_pages - halved) / 2, expected);
    due_ = now + step_;
    return use.unneeded_pages - kept_;
  }

 private:
  const std::chrono::nanoseconds step_;
  Time due_ = Time::max();
  std::array<std::uint64_t, kSteps> taken_{};  // pages, in each of the last steps
  unsigned at_ = 0;
  std::uint64_t kept_ = 0;  // pages that the last step left
  unsigned quiet_ = 0;      // steps
  std::uint64_t activity_ = 0;
};

}  // namespace kvelastic
