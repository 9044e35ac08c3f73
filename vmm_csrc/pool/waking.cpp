#include "pool/waking.h"

namespace kvelastic {

Status wake(Pool& pool, std::chrono::nanoseconds timeout) {
  if (const std::shared_ptr<Places>& places = pool.places()) {
    const Result<Places::Claimed> claimed = places->ask_to_wake();
    if (!claimed) return claimed.error();
    if (Status there = places->wait_for_claim(*claimed, timeout); !there) return there;
  }
  pool.set_asleep(false);
  return ok();
}

}  // namespace kvelastic
