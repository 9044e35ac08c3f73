// One piece on its way, for either engine: its checksum, its aligned memory, how far it is.
//
//     transfer.begin(way, piece);
//     while (!transfer.ended()) transfer.moved(<bytes or -errno of one call for next()>);
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#include "tiers/record_io.h"

namespace kvelastic {

/// One thread at a time. Keeps its aligned memory for the next piece.
class RecordTransfer {
 public:
  void begin(Way way, RecordPiece& piece);
  bool ended() const { return piece_ == nullptr; }

  /// What the next call moves, and where in the file. Pre: !ended().
  iovec* next();
  int fd() const { return piece_->fd; }
  std::uint64_t offset() const { return piece_->offset + done_; }
  Way way() const { return way_; }

  /// Takes in the answer of that call; ends the piece where it is whole or failed.
  void moved(std::int64_t answer);

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  void end(std::int64_t result);

  Way way_ = Way::kRead;
  RecordPiece* piece_ = nullptr;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;  // with padding
  std::size_t done_ = 0;
  unsigned repeats_ = 0;
  iovec vector_{};
  std::unique_ptr<std::byte, Free> aligned_;
  std::size_t aligned_bytes_ = 0;
};

}  // namespace kvelastic
