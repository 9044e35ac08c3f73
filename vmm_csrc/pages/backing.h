// The interface through which a pool gets its memory.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "pages/geometry.h"
#include "pages/range.h"
#include "pages/staging_window.h"

namespace kvelastic {

/// Maps and unmaps pages in every process that uses them. Thread-safe. Calls block; map and unmap
/// are all or nothing. A page is in at most one call at a time.
///
/// A GPU may still use pages that have been freed. drain() waits for that, and no other call waits
/// for drain(): pages can be mapped in the meantime.
class Backing {
 public:
  Backing() = default;
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;
  virtual ~Backing() = default;

  /// On success every process that uses the pages can access them.
  virtual Status map(std::span<const PageIndex> pages) = 0;

  /// True if drain() may have to wait, that is, if the pages are a GPU's.
  virtual bool works_behind() const = 0;

  /// Blocks until every device has finished the work submitted before this call, without a
  /// deadline. Other calls can run in the meantime. Fails as map, and with kStreamsUnknown.
  virtual Status drain() = 0;

  /// On success no process can access the pages and their memory is free. Pre: drain() has
  /// succeeded since the pages were last used.
  virtual Status unmap(std::span<const PageIndex> pages) = 0;

  /// Copies blocks of mapped pages in every buffer, and blocks until the copy is complete. After a
  /// failure any part may have been copied. Pre: as unmap.
  virtual Status copy(std::span<const BlockMove> moves) = 0;

  /// Copies every rank's part of whole blocks into slots of `staging` (CopyTo::kHost) or back
  /// (kDevice). Waits for the device first. After a failure any part may have been copied. The
  /// blocks' pages must stay mapped and the staging alive during the call. Pre: the slots exist,
  /// and an object has room for all ranks.
  virtual Status copy_records(std::span<const BlockSlot> blocks,
                              const std::shared_ptr<Staging>& staging, CopyTo to) = 0;

  /// The number of ranks, each of which has a part in an object.
  virtual std::uint64_t ranks() const { return 1; }

  /// Driver::memory() of each rank, indexed by rank. Empty for the host and for a rank that does
  /// not reply.
  virtual std::vector<std::optional<DeviceMemory>> device_memory() = 0;

  /// Driver::keep_free in every process that creates pages.
  virtual void keep_free(std::uint64_t /*bytes*/) {}

  /// The processes besides this one that create pages.
  virtual std::vector<pid_t> other_processes() const { return {}; }
};

/// A backing whose pages are mapped in this process only.
class LocalBacking final : public Backing {
 public:
  explicit LocalBacking(std::shared_ptr<Range> range) : range_(std::move(range)) {}

  Status map(std::span<const PageIndex> pages) override { return range_->map(pages); }
  bool works_behind() const override { return range_->works_behind(); }
  Status drain() override { return range_->drain(); }
  Status unmap(std::span<const PageIndex> pages) override {
    return range_->unmap_idle(pages, Afterwards::kDestroy);
  }
  Status copy(std::span<const BlockMove> moves) override { return range_->copy_idle(moves); }
  Status copy_records(std::span<const BlockSlot> blocks, const std::shared_ptr<Staging>& staging,
                      CopyTo to) override {
    if (Status finished = range_->drain(); !finished) return finished;
    return window_.copy(blocks, staging, to);
  }
  std::vector<std::optional<DeviceMemory>> device_memory() override {
    return {range_->driver().memory()};
  }
  void keep_free(std::uint64_t bytes) override { range_->keep_free(bytes); }

 private:
  const std::shared_ptr<Range> range_;
  StagingWindow window_{range_, 0};
};

}  // namespace kvelastic
