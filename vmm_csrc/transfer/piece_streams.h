// Pieces over a connected socket, with a checksum of what travelled.
//
//   pieces --gather--> chunk --send-->  socket  --recv--> chunk --scatter--> pieces
//                        '-- checksum                       '-- checksum
//
// Each side takes its bytes through one chunk that fits into a processor's own cache. That is what
// makes the checksum true: a page may be written to, or go, while it is sent, and what is summed is
// what left. It is also faster than to send from the pieces: TCP copies out of the cache.
#pragma once

#include <cstdint>
#include <span>

#include "base/pieces.h"
#include "base/status.h"

namespace kvelastic {

/// Sends pieces, and answers their checksum. Blocks, whatever mode the socket is in. Fails with
/// kInvalidArgument (as bytes_of), kMapping, kChannelClosed, kChannelTimeout, kDeviceUnavailable
/// (as KernelCopy); a part may have been sent.
Result<std::uint64_t> send_pieces(int fd, std::span<const Piece> pieces, PieceDeadline deadline);

/// Receives exactly these pieces, and answers their checksum. As send_pieces.
Result<std::uint64_t> receive_pieces(int fd, std::span<const Piece> pieces, PieceDeadline deadline);

}  // namespace kvelastic
