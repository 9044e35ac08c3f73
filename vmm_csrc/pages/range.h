// Reserved addresses and their page table: which page has which handles.
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

/// A block, and the host address of its contents.
struct BlockRecord {
  BlockId id;
  std::byte* record;
};

/// What happens to the handles of unmapped pages.
enum class Afterwards : std::uint8_t {
  kRecycle,  ///< keep for the next map, which then creates nothing
  kDestroy,  ///< free their memory before the call returns
};

/// Thread-safe, one batch at a time: batches change neighbouring mappings of one address space,
/// which the kernel and the GPU driver serialise anyway. A batch is all or nothing: if step k
/// fails, the k-1 completed steps are undone in reverse. If the undo fails too, the range is
/// `failed`: it refuses further work with kPoolFailed, and the process continues.
class Range {
 public:
  static Result<std::unique_ptr<Range>> reserve(std::shared_ptr<Driver> driver,
                                                const Geometry& geometry);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  /// The process that reserved the range. A forked child must not use it.
  const OwnProcess& made_by() const { return made_by_; }

  /// Maps unmapped pages, with recycled handles first. Blocks while pages are created. Fails with
  /// kInvalidArgument (no such page, already mapped, duplicate), kOutOfMemory, kMapping or
  /// kPoolFailed; then the mappings are unchanged.
  Status map(std::span<const PageIndex> pages);

  /// Fails for the reasons other than memory for which map() would: kInvalidArgument, kPoolFailed.
  Status check_map(std::span<const PageIndex> pages) const;

  /// Waits until the device has finished the work submitted so far, then unmaps the pages; other
  /// calls can run while it waits. Fails as map() and Driver::fence; then every page stays mapped
  /// with its contents.
  Status unmap(std::span<const PageIndex> pages, Afterwards afterwards);
  /// Unmaps without waiting. Pre: the device has finished its work with these pages (see fence()).
  Status unmap_idle(std::span<const PageIndex> pages, Afterwards afterwards);

  /// Waits for the device as unmap() does, then copies blocks in every buffer. Blocks until the
  /// copy is complete. Fails with kInvalidArgument if a block's page is not mapped (nothing is
  /// copied then), kMapping, kPoolFailed, and as Driver::fence.
  Status copy(std::span<const BlockMove> moves);
  /// Copies without waiting. Pre: the device has finished its work with these blocks.
  Status copy_idle(std::span<const BlockMove> moves);

  /// Copies whole blocks, every buffer (contiguous on the host), to or from host
  /// memory. Other pages can be mapped and unmapped in the meantime; the caller keeps the blocks'
  /// pages mapped. Pre: the device has finished its work with them. Fails with kInvalidArgument if
  /// a block's page is not mapped (nothing is copied then), kMapping, kPoolFailed.
  Status copy_records(std::span<const BlockRecord> blocks, CopyTo to);

  Result<std::unique_ptr<Fence>> fence() { return driver_->fence(); }
  bool works_behind() const { return driver_->works_behind(); }
  Status drain() { return driver_->drain(); }

  /// Destroys recycled handles.
  Status trim() { return store_.trim(); }

  /// Sets the pages' grant. It is returned when the range has released its last page.
  void hold_grant_of(std::shared_ptr<PageGrant> grant) { grant_ = std::move(grant); }

  bool is_mapped(PageIndex page) const;
  /// Returns the handles of mapped pages, extents in order, for another process to import. The
  /// caller keeps the pages mapped while it uses the handles. Fails with kInvalidArgument for a
  /// page that does not exist or is not mapped, and with kPoolFailed.
  Result<std::vector<Handle>> handles(std::span<const PageIndex> pages);
  /// From now on adds 1 to the eventfd `bell` after pages of handles() have been unmapped: their
  /// importers have to release them. Keeps a duplicate of the descriptor. Fails with kMapping.
  Status ring_at_unmap(int bell);
  /// Returns the pages of handles() that have been unmapped since ring_at_unmap() or the last call.
  std::vector<PageIndex> take_unmapped();
  /// How many times the page has been unmapped. If the page is mapped and has the same generation
  /// as before, it was mapped all the time.
  std::uint32_t generation(PageIndex page) const;
  std::vector<std::uint32_t> generations(std::span<const PageIndex> pages) const;
  bool failed() const { return failed_.load(std::memory_order_relaxed); }
  std::uint64_t mapped_pages() const { return mapped_pages_.load(std::memory_order_relaxed); }
  /// Bytes of the device in mapped pages and recycled handles.
  std::uint64_t held_bytes() const;

  std::byte* address() const { return address_; }
  const Geometry& geometry() const { return geometry_; }
  const Driver& driver() const { return *driver_; }
  Status pin_host(std::span<std::byte> memory) { return driver_->pin_host(memory); }
  void unpin_host(std::span<std::byte> memory) { driver_->unpin_host(memory); }
  void keep_free(std::uint64_t bytes) { driver_->keep_free(bytes); }

  /// Compares the page table with its counters. For tests and KVELASTIC_SANITY_CHECK. Fails with
  /// kIntegrity.
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
  mutable std::mutex mutex_;        // taken before PageStore's; held during driver calls
  LazyArray<std::uint8_t> mapped_;  // per page: 0, kMapped or kExported
  LazyArray<Handle> handles_;       // per page and extent, valid while mapped
  LazyArray<std::uint32_t> generations_;
  std::shared_ptr<PageGrant> grant_;
  int bell_ = -1;  // an eventfd of this object's own
  std::vector<PageIndex> unmapped_;
  std::atomic<std::uint64_t> mapped_pages_{0};
  std::atomic<bool> failed_{false};
};

}  // namespace kvelastic
