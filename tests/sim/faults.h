// Failures on demand: the n-th call of a function answers what a test wants and does nothing.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

#include "api.h"

namespace kvsim {

/// Counts calls and knows which are to fail. Thread-safe.
///
/// A plan is a comma-separated list of  function:calls:result
///   function   an exported name, its base name, or * for a call of any function
///   calls      3 (the third), 5-7, or 5- (the fifth and all that follow)
///   result     a CUresult by name or number
class FaultPlan {
 public:
  /// The plan of the environment: KVSIM_FAIL, KVSIM_OOM_AT_CREATE and KVSIM_NOT_READY together.
  static FaultPlan& instance();

  /// Replaces the plan; calls count from zero again. False, and nothing changed, when the text
  /// does not parse. An empty text takes all faults away.
  bool set(std::string_view text);

  /// Counts one call; the result it must fail with, if it must.
  std::optional<CUresult> next(Function function);

 private:
  struct Rule {
    std::optional<Function> function;  // empty: any
    std::uint64_t first;
    std::uint64_t last;
    CUresult result;
  };

  static bool parse(std::string_view text, std::vector<Rule>* rules);

  std::mutex mutex_;
  std::atomic<bool> armed_{false};
  std::vector<Rule> rules_;
  std::array<std::uint64_t, kFunctions> calls_{};
  std::uint64_t all_calls_ = 0;
};

}  // namespace kvsim
