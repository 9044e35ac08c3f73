#include "waking.h"

namespace kvelastic {

Status wake(Pool& pool, std::chrono::nanoseconds timeout) {
  if (const std::shared_ptr<Places>& places = pool.places()) {
    if (Status asked = places->ask_to_wake(); !asked) return asked;
    if (Status there = places->wait_for_claim(timeout); !there) return there;
  }
  pool.set_asleep(false);
  return ok();
}

}  // namespace kvelastic
