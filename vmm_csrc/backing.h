// What gives a pool its memory.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "geometry.h"
#include "range.h"
#include "status.h"

namespace kvelastic {

/// Pages come and go through this, wherever they are mapped. Thread-safe; both calls block and are
/// all or nothing. A page is in at most one call at a time.
class Backing {
 public:
  Backing() = default;
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;
  virtual ~Backing() = default;

  /// After success every process that uses the pages can touch them.
  virtual Status map(std::span<const PageIndex> pages) = 0;

  /// After success no process can touch the pages, and their memory is the device's again.
  virtual Status unmap(std::span<const PageIndex> pages) = 0;

  /// Copies blocks of mapped pages, in every buffer; the contents are there when this returns.
  /// After a failure any part may have been copied. Blocks.
  virtual Status copy(std::span<const BlockMove> moves) = 0;

  /// What each rank has seen lately of its device's memory, by rank; none on the host. See
  /// Driver::memory().
  virtual std::vector<std::optional<DeviceMemory>> device_memory() const = 0;

  /// As Driver::keep_free, wherever pages are created.
  virtual void keep_free(std::uint64_t /*bytes*/) {}

  /// The processes in which pages are created, where that is not this one.
  virtual std::vector<pid_t> other_processes() const { return {}; }
};

/// Memory of this process.
class LocalBacking final : public Backing {
 public:
  explicit LocalBacking(std::shared_ptr<Range> range) : range_(std::move(range)) {}

  Status map(std::span<const PageIndex> pages) override { return range_->map(pages); }
  Status unmap(std::span<const PageIndex> pages) override {
    return range_->unmap(pages, Afterwards::kDestroy);
  }
  Status copy(std::span<const BlockMove> moves) override { return range_->copy(moves); }
  std::vector<std::optional<DeviceMemory>> device_memory() const override {
    return {range_->driver().memory()};
  }
  void keep_free(std::uint64_t bytes) override { range_->keep_free(bytes); }

 private:
  const std::shared_ptr<Range> range_;
};

}  // namespace kvelastic
