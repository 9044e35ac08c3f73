#pragma once

#include <cstddef>
#include <span>

namespace kvelastic {

/// Copies the control block at the start of an open file to `out`, as far as the file and `out`
/// reach; the rest of `out` is unchanged. Each latch's newest value is whole unless its writer
/// overtook kLatchReadTries attempts. Returns 0 or errno. Any thread, any process.
///
/// Used for files that another process may truncate at any time: reading a mapping would raise
/// SIGBUS then.
int copy_control_block(int fd, std::span<std::byte> out);

}  // namespace kvelastic
