// Memory between blocks and stores: slots of one record each, which a store reads and writes as
// they lie, and which every process of an instance can map. Anonymous (a memfd): it is gone with
// the last process that has it.
//
//   slot i:  [ rank 0's part | rank 1's part | ... ][ up to a multiple of kSlotAlignment ]
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/own_process.h"
#include "base/status.h"

namespace kvelastic {

/// How another process finds a staging: as the process that made it numbers its descriptors.
struct StagingName {
  std::uint64_t pid = 0;
  std::uint64_t fd = 0;
  std::uint64_t slots = 0;
  std::uint64_t record_bytes = 0;
};

/// Thread-safe: nothing of it changes. Who uses a slot is for its owner to say.
class Staging {
 public:
  /// What O_DIRECT asks of addresses.
  static constexpr std::size_t kSlotAlignment = 4096;

  /// Fails with kInvalidArgument for no slots, no bytes or more than 2^46 bytes; kOutOfMemory,
  /// kMapping. Its memory is taken as it is first touched.
  static Result<std::unique_ptr<Staging>> create(std::uint64_t slots, std::uint64_t record_bytes);
  /// The staging of another process of this user, or of this one. Fails with kMapping where it is
  /// gone, or is not as its name says.
  static Result<std::unique_ptr<Staging>> attach(const StagingName& name);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  StagingName name() const;
  std::uint64_t slots() const { return slots_; }
  std::uint64_t record_bytes() const { return record_bytes_; }
  /// The record in a slot. Pre: slot < slots().
  std::span<std::byte> record(std::uint64_t slot) const {
    return {address_ + slot * slot_bytes_, record_bytes_};
  }
  /// All of it.
  std::span<std::byte> memory() const { return {address_, slots_ * slot_bytes_}; }
  /// In a forked child its memory is the parent's, too, and its slots are not the child's to use.
  const OwnProcess& made_by() const { return made_by_; }

 private:
  Staging(int fd, std::byte* address, std::uint64_t slots, std::uint64_t record_bytes)
      : fd_(fd),
        address_(address),
        slots_(slots),
        record_bytes_(record_bytes),
        slot_bytes_(slot_bytes(record_bytes)) {}

  static std::uint64_t slot_bytes(std::uint64_t record_bytes) {
    return (record_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
  }
  static Status check(std::uint64_t slots, std::uint64_t record_bytes);
  static Result<std::unique_ptr<Staging>> map(int fd, std::uint64_t slots,
                                              std::uint64_t record_bytes);

  const int fd_;
  std::byte* const address_;
  const std::uint64_t slots_;
  const std::uint64_t record_bytes_;
  const std::uint64_t slot_bytes_;
  const OwnProcess made_by_;
};

}  // namespace kvelastic
