// Records of a disk tier's files that were taken over, on their way into an index, oldest first.
//
//   add() a part of a file's table ... end_file()   checked, then sorted file by file
//   restore(index, most)                            the oldest of all files, `most` at a time
//
// Each call does a bounded part of the work, so that its caller can let others have the lock in
// between. For one thread at a time. The layout of an entry is
// kvelastic/tiers/stores/disk/format.py's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "tiers/tier_index.h"

namespace kvelastic {

class FoundRecords {
 public:
  static constexpr std::size_t kEntryBytes = 128;
  static constexpr std::size_t kOwnerBytes = 40;
  using Owner = std::array<std::byte, kOwnerBytes>;
  using FileId = std::array<std::byte, 16>;

  struct Record {
    BlockKey key;
    BlockKey parent;
    std::uint64_t checksum;
    std::uint64_t stored_ns;
    std::uint64_t position;  ///< in the batch it was put with
    std::uint32_t slot;      ///< of the store
    std::uint32_t owner;     ///< in owners()
  };
  /// Where the entries of a part belong.
  struct Part {
    FileId file_id;
    std::uint64_t first_own;   ///< the slot of the part's first entry, in its file
    std::uint64_t first_slot;  ///< the same as the store numbers it
    std::uint64_t record_bytes;
    std::uint64_t whole_slots;  ///< slots of the file from here on have no whole record: it was cut
  };
  struct Added {
    std::vector<std::int64_t> empty;  ///< own slots without an entry
    std::vector<std::int64_t> torn;   ///< own slots whose entry is not whole, or not of its place
  };
  struct Restored {
    std::vector<Record> records;
    std::vector<std::int64_t> refused;  ///< slots whose key has another record
  };

  /// Reads the entries of a part of a table; those that are whole are restored later.
  Added add(std::span<const std::byte> entries, const Part& part);
  /// All parts of a file were added.
  void end_file();
  /// Restores up to `most` records in closed or free slots. Pre: every file has ended.
  Restored restore(TierIndex& index, std::size_t most);

  std::size_t left() const { return left_; }
  const std::vector<Owner>& owners() const { return owners_; }

 private:
  std::uint32_t number_of(const Owner& owner);

  std::vector<Record> unsorted_;
  std::vector<std::vector<Record>> files_;  ///< of each file what is left, the oldest last
  std::size_t left_ = 0;
  std::vector<Owner> owners_;
  std::map<Owner, std::uint32_t> numbers_;
};

}  // namespace kvelastic
