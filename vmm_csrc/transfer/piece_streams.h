// Pieces over a connected socket, with a checksum of what travelled.
//
//   pieces --gather--> chunk --send-->  socket  --recv--> chunk --scatter--> pieces
//                        '-- checksum                       '-- checksum
//
// Each side passes its bytes through one chunk that fits into a processor's cache. This makes the
// checksum valid: a page may be written or unmapped while it is sent, and the sum covers the bytes
// actually sent. It is also faster than sending from the pieces, because TCP copies from the cache.
#pragma once

#include <cstdint>
#include <span>

#include "base/memory_pieces.h"
#include "base/status.h"

namespace kvelastic {

/// Sends pieces and returns their checksum. Blocks in any mode of the socket. Fails with
/// kInvalidArgument (as bytes_of), kMapping, kChannelClosed, kChannelTimeout, kDeviceUnavailable
/// (as KernelCopy); a part may have been sent.
Result<std::uint64_t> send_pieces(int fd, std::span<const Piece> pieces, PieceDeadline deadline);

/// Receives exactly these pieces and returns their checksum. Fails as send_pieces.
Result<std::uint64_t> receive_pieces(int fd, std::span<const Piece> pieces, PieceDeadline deadline);

}  // namespace kvelastic
