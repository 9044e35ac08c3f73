// Copies between processes of one host, by the kernel: what is not mapped is an error (EFAULT), not
// a fault. Between hosts, or where the kernel refuses to read another process's memory, see
// piece_streams.h.
#pragma once

#include <sys/types.h>

#include <span>

#include "base/memory_pieces.h"

namespace kvelastic {

/// Copies pieces of another process into pieces of this one, by up to two threads. Blocks. Fails
/// with kInvalidArgument (the sizes differ), kMapping (one side is not mapped), kChannelClosed (no
/// such process), kDeviceUnavailable (the system forbids the call), kChannelTimeout; a failed call
/// may have copied a part.
Status read_from_process(pid_t pid, std::span<const Piece> theirs, std::span<const Piece> ours,
                         PieceDeadline deadline);

}  // namespace kvelastic
