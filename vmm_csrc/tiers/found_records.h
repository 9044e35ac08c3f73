// Adds the records in a disk tier's existing files to an index, oldest first.
//
//   add() a part of a file's table ... end_file()   checks entries, then sorts them file by file
//   restore(index, most)                            oldest first across the files, `most` at a time
//
// Each call does a bounded part of the work, so that its caller can release its lock in between.
// For one thread at a time. kvelastic/tiers/stores/disk/format.py defines the layout of an entry.
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
    std::uint64_t position;  ///< in the batch with which it was stored
    std::uint32_t slot;      ///< in the store
    std::uint32_t owner;     ///< index in owners()
  };
  /// A part of a file's table.
  struct Part {
    FileId file_id;
    std::uint64_t first_own;   ///< the slot of the part's first entry, in the file's numbering
    std::uint64_t first_slot;  ///< the same slot, in the store's numbering
    std::uint64_t record_bytes;
    std::uint64_t whole_slots;  ///< slots from this one on are not whole: the file was truncated
  };
  struct Added {
    std::vector<std::int64_t> empty;  ///< slots of the file without an entry
    std::vector<std::int64_t> torn;   ///< slots of the file with an invalid or misplaced entry
  };
  struct Restored {
    std::vector<Record> records;
    std::vector<std::int64_t> refused;  ///< slots whose key already has another record
  };

  /// Reads the entries of a part of a table and keeps the valid ones for restore().
  Added add(std::span<const std::byte> entries, const Part& part);
  /// Call it when all parts of a file were added: sorts the file's records.
  void end_file();
  /// Restores up to `most` records into closed or free slots. Pre: end_file() was called for every
  /// file.
  Restored restore(TierIndex& index, std::size_t most);

  std::size_t left() const { return left_; }
  const std::vector<Owner>& owners() const { return owners_; }

 private:
  std::uint32_t number_of(const Owner& owner);

  std::vector<Record> unsorted_;
  std::vector<std::vector<Record>> files_;  ///< by file: the remaining records, the oldest last
  std::size_t left_ = 0;
  std::vector<Owner> owners_;
  std::map<Owner, std::uint32_t> numbers_;
};

}  // namespace kvelastic
