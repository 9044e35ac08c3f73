// What gives a pool its memory.
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

/// Pages come and go through this, wherever they are mapped. Thread-safe; calls block, and map and
/// unmap are all or nothing. A page is in at most one call at a time.
///
/// A GPU may still be at work with pages that nobody uses any more. That is waited for by drain(),
/// which no other call waits for: pages are mapped meanwhile.
class Backing {
 public:
  Backing() = default;
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;
  virtual ~Backing() = default;

  /// After success every process that uses the pages can touch them.
  virtual Status map(std::span<const PageIndex> pages) = 0;

  /// Whether drain() may have to wait: the pages are a GPU's.
  virtual bool works_behind() const = 0;

  /// Waits until every device has finished what was given to it before this call, however long that
  /// takes; other calls go on meanwhile. Fails as map, and with kStreamsUnknown.
  virtual Status drain() = 0;

  /// After success no process can touch the pages, and their memory is the device's again. Pre: the
  /// devices have finished their work with them: drain(), since the pages were last used.
  virtual Status unmap(std::span<const PageIndex> pages) = 0;

  /// Copies blocks of mapped pages, in every buffer; the contents are there when this returns.
  /// After a failure any part may have been copied. Pre: as unmap.
  virtual Status copy(std::span<const BlockMove> moves) = 0;

  /// Copies whole blocks into slots of `staging` (CopyTo::kHost), or back (kDevice): every rank's
  /// part. Waits for the device first. After a failure any part may have been copied. The pages of
  /// the blocks must stay mapped meanwhile, the staging alive. Pre: slots are the staging's; its
  /// record has room for all ranks.
  virtual Status copy_records(std::span<const BlockSlot> blocks,
                              const std::shared_ptr<Staging>& staging, CopyTo to) = 0;

  /// How many ranks have a part in a record.
  virtual std::uint64_t ranks() const { return 1; }

  /// Driver::memory() of each rank, by rank, as it is now; none on the host, and where a rank does
  /// not answer.
  virtual std::vector<std::optional<DeviceMemory>> device_memory() = 0;

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
