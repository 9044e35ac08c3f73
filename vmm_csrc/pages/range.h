// Reserved addresses and the page table over them: which page index holds which handles.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/lazy_array.h"
#include "base/own_process.h"
#include "driver/driver.h"
#include "pages/geometry.h"
#include "pages/page_grant.h"
#include "pages/pages.h"

namespace kvelastic {

/// A block, and where its record lies in memory of the host.
struct BlockRecord {
  BlockId id;
  std::byte* record;
};

/// What becomes of the handles of unmapped pages.
enum class Afterwards : std::uint8_t {
  kRecycle,  ///< kept for the next map: no driver create then
  kDestroy,  ///< their memory is the device's again when the call returns
};

/// Thread-safe: one batch at a time (batches change neighbouring mappings of one address space,
/// which the kernel and the GPU driver serialise anyway). A batch is all or nothing: when step k of
/// n fails, the k-1 done steps are undone in reverse. Should undoing fail too, the range is
/// `failed`: it refuses further work with kPoolFailed, and the process lives on.
class Range {
 public:
  static Result<std::unique_ptr<Range>> reserve(std::shared_ptr<Driver> driver,
                                                const Geometry& geometry);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  /// As Pool::made_by().
  const OwnProcess& made_by() const { return made_by_; }

  /// Maps pages that are not mapped, recycled handles first. Blocks while pages are created.
  /// Fails with kInvalidArgument (no such page, mapped already, named twice), kOutOfMemory,
  /// kMapping or kPoolFailed; nothing is mapped then that was not before.
  Status map(std::span<const PageIndex> pages);

  /// What map() would refuse of these pages whatever memory there is: kInvalidArgument,
  /// kPoolFailed.
  Status check_map(std::span<const PageIndex> pages) const;

  /// Unmaps mapped pages, when the device has finished what was given to it before; other calls go
  /// on meanwhile. The same failures, and those of Driver::fence; on one, every page is mapped as
  /// before, contents kept.
  Status unmap(std::span<const PageIndex> pages, Afterwards afterwards);
  /// The same at once. Pre: the device has finished its work with these pages (see fence()).
  Status unmap_idle(std::span<const PageIndex> pages, Afterwards afterwards);

  /// Copies blocks, in every buffer, when the device has finished what was given to it before, and
  /// returns when the copies are there. Fails with kInvalidArgument where a block's page is not
  /// mapped, nothing copied; kMapping, kPoolFailed, and as Driver::fence.
  Status copy(std::span<const BlockMove> moves);
  /// The same at once. Pre: the device has finished its work with these blocks.
  Status copy_idle(std::span<const BlockMove> moves);

  /// Copies whole blocks, all buffers of each side by side, to or from memory of the host. Pages
  /// are mapped and unmapped meanwhile: the caller keeps those of these blocks. Pre: the device has
  /// finished its work with them. Fails with kInvalidArgument where a block's page is not mapped,
  /// nothing copied; kMapping, kPoolFailed.
  Status copy_records(std::span<const BlockRecord> blocks, CopyTo to);

  /// As Driver::fence, works_behind and drain.
  Result<std::unique_ptr<Fence>> fence() { return driver_->fence(); }
  bool works_behind() const { return driver_->works_behind(); }
  Status drain() { return driver_->drain(); }

  /// Destroys recycled handles.
  Status trim() { return store_.trim(); }

  /// Whose grant the pages are: it is given back when the last of them is gone with this range.
  void hold_grant_of(std::shared_ptr<PageGrant> grant) { grant_ = std::move(grant); }

  bool is_mapped(PageIndex page) const;
  /// The handles of mapped pages, all extents of each side by side; for another process to import
  /// them. The caller keeps the pages mapped as long as it uses the handles. Fails with
  /// kInvalidArgument for a page that is not there or not mapped, kPoolFailed.
  Result<std::vector<Handle>> handles(std::span<const PageIndex> pages) const;
  /// How often the page was unmapped so far: who reads it compares before and after. A page that is
  /// mapped and of the same generation as before has been there all the time.
  std::uint32_t generation(PageIndex page) const;
  bool failed() const { return failed_.load(std::memory_order_relaxed); }
  std::uint64_t mapped_pages() const { return mapped_pages_.load(std::memory_order_relaxed); }
  /// Bytes of the device that are held: mapped pages and recycled handles.
  std::uint64_t held_bytes() const;

  std::byte* address() const { return address_; }
  const Geometry& geometry() const { return geometry_; }
  const Driver& driver() const { return *driver_; }
  /// As Driver::pin_host and unpin_host.
  Status pin_host(std::span<std::byte> memory) { return driver_->pin_host(memory); }
  void unpin_host(std::span<std::byte> memory) { driver_->unpin_host(memory); }
  /// As Driver::keep_free.
  void keep_free(std::uint64_t bytes) { driver_->keep_free(bytes); }

  /// Compares the page table with its counters and the driver's figures; for tests and for
  /// KVELASTIC_SANITY_CHECK. Fails with kIntegrity.
  Status check_integrity() const;

 private:
  Range(std::shared_ptr<Driver> driver, const Geometry& geometry, std::byte* address);

  Status check_batch(std::span<const PageIndex> pages, bool must_be_mapped) const;
  void log_pages(const char* what, std::size_t pages) const;
  Status map_extents(std::span<const PageIndex> pages, std::span<const Handle> handles);
  Status enable(std::span<const PageIndex> pages);
  Status unmap_extents(std::span<const PageIndex> pages);
  Status undo_map(std::span<const PageIndex> pages, std::size_t extents_mapped);
  void mark_failed() { failed_.store(true, std::memory_order_relaxed); }
  Status refuse_if_failed() const;
  Status refuse_unmapped(BlockId id) const;
  std::byte* extent_address(PageIndex page, std::uint64_t extent) const {
    return address_ + geometry_.extent_offset(page, extent);
  }
  Handle& handle_of(PageIndex page, std::uint64_t extent) {
    return handles_[page * geometry_.extents_per_page + extent];
  }

  const OwnProcess made_by_;
  const std::shared_ptr<Driver> driver_;
  const Geometry geometry_;
  std::byte* const address_;
  PageStore store_;
  mutable std::mutex mutex_;        // before PageStore's; held across driver calls
  LazyArray<std::uint8_t> mapped_;  // per page: 1 = mapped
  LazyArray<Handle> handles_;       // per page and extent, valid while mapped
  LazyArray<std::uint32_t> generations_;
  std::shared_ptr<PageGrant> grant_;
  std::atomic<std::uint64_t> mapped_pages_{0};
  std::atomic<bool> failed_{false};
};

}  // namespace kvelastic
