// Wakes a sleeping pool: claims its guarantee and reserve in the devices' ledgers first.
#pragma once

#include <chrono>

#include "base/status.h"
#include "pool/pool.h"

namespace kvelastic {

/// Allows allocs again once all ledgers have granted the guarantee and the reserve, which other
/// instances are requested to release. Fails as Places::ask_to_wake and wait_for_claim, and with
/// kReserve if the pool is put to sleep in between; it then stays asleep. Blocks, at most for
/// `timeout`. No effect if the pool is awake.
Status wake(Pool& pool, std::chrono::nanoseconds timeout);

}  // namespace kvelastic
