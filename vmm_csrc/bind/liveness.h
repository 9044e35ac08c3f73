// The names of a process's liveness.
#pragma once

#include "base/liveness_lock.h"

namespace kvelastic {

/// The values of kvelastic.shared.liveness.Liveness.
constexpr const char* liveness_name(Liveness liveness) {
  switch (liveness) {
    case Liveness::kAlive:
      return "alive";
    case Liveness::kDead:
      return "dead";
    case Liveness::kUnknown:
      break;
  }
  return "unknown";
}

}  // namespace kvelastic
