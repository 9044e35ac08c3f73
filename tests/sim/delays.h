// What a call costs on a real GPU, spent here as time: profiles, and how to wait honestly.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "api.h"

namespace kvsim {

/// What one call did, as far as its price goes. A driver charges for each handle that a call
/// touches, and some charge for bytes too.
struct Work {
  std::size_t handles = 1;
  std::size_t granules = 0;
};

/// The steady clock.
std::uint64_t now_ns();

class Delays {
 public:
  /// KVSIM_PROFILE, with KVSIM_DELAY on top of it.
  static const Delays& instance();

  /// Waits until `function`, begun at `began_ns`, has taken what it costs for `work`. What the
  /// simulation itself took is part of that, not on top of it.
  void spend(Function function, const Work& work, std::uint64_t began_ns) const;

 private:
  struct Price {
    double handle_us = 0;
    double granule_us = 0;
  };

  bool add(std::string_view text);

  std::array<Price, kFunctions> prices_{};
};

}  // namespace kvsim
