// Memory between blocks and stores: slots of one object each. Stores read and write the slots
// directly, and every process of an instance can map them. The memory is a memfd, so it is freed
// with the last process that has it.
//
//   slot i:  [ rank 0's part | rank 1's part | ... ][ padding to a multiple of kSlotAlignment ]
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/own_process.h"
#include "base/status.h"

namespace kvelastic {

/// How another process finds a staging: a pid and a descriptor number of that process.
struct StagingName {
  std::uint64_t pid = 0;
  std::uint64_t fd = 0;
  std::uint64_t slots = 0;
  std::uint64_t record_bytes = 0;
};

/// Thread-safe: immutable. The owner decides which thread uses a slot.
class Staging {
 public:
  /// The address alignment that O_DIRECT requires.
  static constexpr std::size_t kSlotAlignment = 4096;

  /// Fails with kInvalidArgument for no slots, no bytes or more than 2^46 bytes, and with
  /// kOutOfMemory or kMapping. Memory is allocated at the first touch.
  static Result<std::unique_ptr<Staging>> create(std::uint64_t slots, std::uint64_t record_bytes);
  /// Attaches a staging of this process or of another process of this user. Fails with kMapping if
  /// it no longer exists or does not match `name`.
  static Result<std::unique_ptr<Staging>> attach(const StagingName& name);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  StagingName name() const;
  std::uint64_t slots() const { return slots_; }
  std::uint64_t record_bytes() const { return record_bytes_; }
  /// The object in a slot. Pre: slot < slots().
  std::span<std::byte> record(std::uint64_t slot) const {
    return {address_ + slot * slot_bytes_, record_bytes_};
  }
  std::span<std::byte> memory() const { return {address_, slots_ * slot_bytes_}; }
  /// The creating process. In a forked child the memory is still the parent's, and the child must
  /// not use its slots.
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
