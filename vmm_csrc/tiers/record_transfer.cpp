#include "tiers/record_transfer.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace kvelastic {
namespace {

constexpr std::size_t kMask = kDirectAlignment - 1;
/// Answers of "again" in a row that are taken for a failure.
constexpr unsigned kMaxRepeats = 1000;

bool is_aligned(const RecordPiece& piece) {
  return ((reinterpret_cast<std::uintptr_t>(piece.data) | piece.bytes) & kMask) == 0;
}

}  // namespace

void RecordTransfer::begin(Way way, RecordPiece& piece) {
  way_ = way;
  piece_ = &piece;
  memory_ = piece.data;
  bytes_ = piece.bytes;
  done_ = 0;
  repeats_ = 0;
  if (way == Way::kWrite) piece.checksum = record_checksum({piece.data, piece.bytes}, piece.key);
  if (!piece.direct || is_aligned(piece)) return;
  bytes_ = (piece.bytes + kMask) & ~kMask;
  if (aligned_bytes_ < bytes_) {
    aligned_.reset(static_cast<std::byte*>(std::aligned_alloc(kDirectAlignment, bytes_)));
    aligned_bytes_ = aligned_ == nullptr ? 0 : bytes_;
    if (aligned_ == nullptr) {
      end(-ENOMEM);
      return;
    }
  }
  memory_ = aligned_.get();
  if (way == Way::kWrite) {
    std::memcpy(memory_, piece.data, piece.bytes);
    std::memset(memory_ + piece.bytes, 0, bytes_ - piece.bytes);
  }
}

iovec* RecordTransfer::next() {
  vector_ = {memory_ + done_, bytes_ - done_};
  return &vector_;
}

void RecordTransfer::moved(std::int64_t answer) {
  if (answer == -EINTR || answer == -EAGAIN) {
    if (++repeats_ > kMaxRepeats) end(answer);
    return;
  }
  repeats_ = 0;
  if (answer < 0) {
    end(answer);
    return;
  }
  done_ += static_cast<std::size_t>(answer);
  // Nothing more came: the end of the file. A direct call cannot go on from an odd place: neither.
  const bool stuck = answer == 0 || (piece_->direct && (done_ & kMask) != 0);
  if (done_ >= bytes_ || stuck) end(static_cast<std::int64_t>(std::min(done_, piece_->bytes)));
}

void RecordTransfer::end(std::int64_t result) {
  RecordPiece& piece = *piece_;
  piece_ = nullptr;
  piece.result = result;
  if (way_ == Way::kWrite || result != static_cast<std::int64_t>(piece.bytes)) return;
  if (memory_ != piece.data) std::memcpy(piece.data, memory_, piece.bytes);
  piece.checksum = record_checksum({piece.data, piece.bytes}, piece.key);
}

}  // namespace kvelastic
