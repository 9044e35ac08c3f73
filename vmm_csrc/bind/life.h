// The names of a process's liveness.
#pragma once

#include "base/life_lock.h"

namespace kvelastic {

/// The values of kvelastic.shared.liveness.Liveness.
constexpr const char* life_name(Life life) {
  switch (life) {
    case Life::kAlive:
      return "alive";
    case Life::kDead:
      return "dead";
    case Life::kUnknown:
      break;
  }
  return "unknown";
}

}  // namespace kvelastic
