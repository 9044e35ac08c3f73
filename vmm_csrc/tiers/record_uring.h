// Records by io_uring: its system calls and nothing else (no liburing).
#pragma once

#include <memory>

#include "tiers/record_io.h"

namespace kvelastic {

/// An engine, or null where kernel, build or seccomp have none for this process; `why` is then
/// the errno (ENOSYS: not in this build).
std::unique_ptr<RecordEngine> make_uring_engine(unsigned depth, int& why);

}  // namespace kvelastic
