// How a sleeping pool wakes: its guarantee and reserve are asked of the devices' ledgers first.
#pragma once

#include <chrono>

#include "base/status.h"
#include "pool/pool.h"

namespace kvelastic {

/// Lets blocks be handed out again when all ledgers have room for the guarantee and the reserve,
/// which others are asked to give. Fails as Places::ask_to_wake and wait_for_claim, with
/// kReserve also where somebody puts the pool to sleep meanwhile; it sleeps then as before. Blocks,
/// for `timeout` at most. Does nothing where it is awake.
Status wake(Pool& pool, std::chrono::nanoseconds timeout);

}  // namespace kvelastic
