#include "pages/range.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/debug_log.h"
#include "base/size_text.h"

namespace kvelastic {
namespace {

constexpr std::uint8_t kMapped = 1;
constexpr std::uint8_t kExported = 2;  // mapped, and another process may have imported its handles

/// Calls `run(first, count)` for each maximal run of consecutive pages in `sorted`.
template <typename F>
Status for_each_run(std::span<const PageIndex> sorted, F run) {
  for (std::size_t begin = 0; begin < sorted.size();) {
    std::size_t end = begin + 1;
    while (end < sorted.size() && sorted[end] == sorted[end - 1] + 1) ++end;
    if (Status done = run(sorted[begin], end - begin); !done) return done;
    begin = end;
  }
  return ok();
}

/// Retries a failed attempt once.
template <typename F>
void try_twice(F attempt) {
  if (!attempt()) (void)attempt();
}

}  // namespace

Result<std::unique_ptr<Range>> Range::reserve(std::shared_ptr<Driver> driver,
                                              const Geometry& geometry) {
  if (Status sound = geometry.check(driver->granularity_bytes()); !sound) return sound.error();
  Result<std::byte*> address = driver->reserve(geometry.range_bytes());
  if (!address) return address.error();
  std::unique_ptr<Range> range(new Range(std::move(driver), geometry, *address));
  if (Status made = range->mapped_.allocate(geometry.pages); !made) return made.error();
  if (Status made = range->generations_.allocate(geometry.pages); !made) return made.error();
  if (Status made = range->handles_.allocate(geometry.pages * geometry.extents_per_page); !made) {
    return made.error();
  }
  return range;
}

Range::Range(std::shared_ptr<Driver> driver, const Geometry& geometry, std::byte* address)
    : driver_(std::move(driver)),
      geometry_(geometry),
      address_(address),
      store_(driver_, geometry.extent_bytes) {}

Range::~Range() {
  // In a forked child the locks may be held by threads that it does not have, and the pages are the
  // parent's.
  if (!made_by_.is_this()) {
    if (bell_ >= 0) ::close(bell_);
    return;
  }
  std::vector<PageIndex> pages;
  for (PageIndex page = 0; page < mapped_.size() && pages.size() < mapped_pages(); ++page) {
    if (mapped_[page] != 0) pages.push_back(page);
  }
  if (grant_) grant_->leaving(held_bytes() / geometry_.extent_bytes, geometry_.extent_bytes);
  // A destructor cannot report a failure. A transient one is retried; a permanent one leaves the
  // memory allocated until the process ends.
  try_twice([&] { return unmap(pages, Afterwards::kDestroy); });
  try_twice([&] { return store_.trim(); });
  if (grant_ && held_bytes() == 0) grant_->leave();
  if (grant_ && held_bytes() > 0) grant_->linger();
  if (mapped_pages() == 0)
    try_twice([&] { return driver_->release(address_, geometry_.range_bytes()); });
  if (bell_ >= 0) ::close(bell_);
}

Status Range::map(std::span<const PageIndex> pages) {
  const std::lock_guard lock(mutex_);
  if (Status usable = refuse_if_failed(); !usable) return usable;
  if (Status sound = check_batch(pages, false); !sound) return sound;
  std::vector<PageIndex> sorted(pages.begin(), pages.end());
  std::sort(sorted.begin(), sorted.end());
  std::vector<Handle> handles(sorted.size() * geometry_.extents_per_page);
  Result<std::size_t> recycled = store_.acquire(handles);
  if (!recycled) return recycled.error();
  if (Status done = map_extents(sorted, handles); !done) {
    if (!failed()) store_.give_up(handles, *recycled);
    return done;
  }
  std::size_t next = 0;
  for (const PageIndex page : sorted) {
    mapped_[page] = kMapped;
    for (std::uint64_t e = 0; e < geometry_.extents_per_page; ++e) {
      handle_of(page, e) = handles[next++];
    }
  }
  mapped_pages_.fetch_add(sorted.size(), std::memory_order_relaxed);
  log_pages("mapped", sorted.size());
  return ok();
}

void Range::log_pages(const char* what, std::size_t pages) const {
  if (pages == 0 || !debug_logging()) return;
  debug_log("pages: %s %zu of %s; %llu are mapped", what, pages,
            size_text(geometry_.page_bytes()).c_str(),
            static_cast<unsigned long long>(mapped_pages_.load(std::memory_order_relaxed)));
}

Status Range::check_map(std::span<const PageIndex> pages) const {
  const std::lock_guard lock(mutex_);
  if (Status usable = refuse_if_failed(); !usable) return usable;
  return check_batch(pages, false);
}

Status Range::map_extents(std::span<const PageIndex> pages, std::span<const Handle> handles) {
  std::size_t done = 0;
  for (const PageIndex page : pages) {
    for (std::uint64_t e = 0; e < geometry_.extents_per_page; ++e, ++done) {
      Status mapped = driver_->map(extent_address(page, e), geometry_.extent_bytes, handles[done]);
      if (mapped) continue;
      if (Status undone = undo_map(pages, done); !undone) return undone;
      return mapped;
    }
  }
  Status enabled = enable(pages);
  if (enabled) return ok();
  if (Status undone = undo_map(pages, done); !undone) return undone;
  return enabled;
}

Status Range::enable(std::span<const PageIndex> pages) {
  for (std::uint64_t e = 0; e < geometry_.extents_per_page; ++e) {
    Status enabled = for_each_run(pages, [&](PageIndex first, std::size_t count) {
      return driver_->set_access(extent_address(first, e), count * geometry_.extent_bytes);
    });
    if (!enabled) return enabled;
  }
  return ok();
}

Status Range::undo_map(std::span<const PageIndex> pages, std::size_t extents_mapped) {
  while (extents_mapped > 0) {
    --extents_mapped;
    const PageIndex page = pages[extents_mapped / geometry_.extents_per_page];
    const std::uint64_t extent = extents_mapped % geometry_.extents_per_page;
    Status undone = driver_->unmap(extent_address(page, extent), geometry_.extent_bytes);
    if (undone) continue;
    mark_failed();
    return Error{Errc::kPoolFailed, "a failed map could not be undone (" + undone.error().message +
                                        "); restart the engine to use the pool again"};
  }
  return ok();
}

Status Range::unmap(std::span<const PageIndex> pages, Afterwards afterwards) {
  if (pages.empty()) return ok();
  // Before the lock: a map must not wait for the device's work on other pages.
  if (Status finished = driver_->drain(); !finished) return finished;
  return unmap_idle(pages, afterwards);
}

Status Range::unmap_idle(std::span<const PageIndex> pages, Afterwards afterwards) {
  const std::lock_guard lock(mutex_);
  if (Status usable = refuse_if_failed(); !usable) return usable;
  if (Status sound = check_batch(pages, true); !sound) return sound;
  std::vector<PageIndex> sorted(pages.begin(), pages.end());
  std::sort(sorted.begin(), sorted.end());
  std::vector<Handle> handles;
  handles.reserve(sorted.size() * geometry_.extents_per_page);
  if (bell_ >= 0) unmapped_.reserve(unmapped_.size() + sorted.size());
  // Before the memory is unmapped, and also if unmapping then fails: a reader that is notified
  // needlessly only reads again.
  for (const PageIndex page : sorted) ++generations_[page];
  if (Status done = unmap_extents(sorted); !done) return done;
  bool was_exported = false;
  for (const PageIndex page : sorted) {
    if (bell_ >= 0 && mapped_[page] == kExported) {
      unmapped_.push_back(page);
      was_exported = true;
    }
    mapped_[page] = 0;
    for (std::uint64_t e = 0; e < geometry_.extents_per_page; ++e) {
      handles.push_back(handle_of(page, e));
    }
  }
  mapped_pages_.fetch_sub(sorted.size(), std::memory_order_relaxed);
  log_pages("unmapped", sorted.size());
  if (was_exported) (void)::eventfd_write(bell_, 1);
  if (afterwards == Afterwards::kRecycle) {
    store_.recycle(handles);
    return ok();
  }
  // The pages are unmapped by now in any case. A handle that cannot be destroyed is retried once
  // and then kept as recycled: it stays counted and is the first to be reused or trimmed.
  if (!store_.destroy(handles)) (void)store_.trim();
  return ok();
}

Status Range::copy(std::span<const BlockMove> moves) {
  if (Status finished = driver_->drain(); !finished) return finished;
  return copy_idle(moves);
}

Status Range::copy_idle(std::span<const BlockMove> moves) {
  const std::lock_guard lock(mutex_);
  if (Status usable = refuse_if_failed(); !usable) return usable;
  std::vector<CopyRun> runs;
  runs.reserve(moves.size() * geometry_.extents_per_page);
  for (const BlockMove& move : moves) {
    for (const BlockId id : {move.from, move.to}) {
      if (Status mapped = refuse_unmapped(id); !mapped) return mapped;
    }
    for (std::uint64_t e = 0; e < geometry_.extents_per_page; ++e) {
      runs.push_back({address_ + geometry_.block_offset(move.to, e, 0),
                      address_ + geometry_.block_offset(move.from, e, 0), geometry_.block_bytes,
                      geometry_.buffers_per_extent,
                      geometry_.blocks_per_page * geometry_.block_bytes});
    }
  }
  return driver_->copy(runs);
}

/// Pre: mutex_ is held.
Status Range::refuse_unmapped(BlockId id) const {
  const bool inside =
      id > 0 && static_cast<std::uint64_t>(id) <
                    geometry_.pages * geometry_.extent_bytes / geometry_.block_bytes;
  if (inside && mapped_[geometry_.page_of(id)] != 0) return ok();
  return Error{Errc::kInvalidArgument, "block " + std::to_string(id) + " is on no mapped page"};
}

Status Range::copy_records(std::span<const BlockRecord> blocks, CopyTo to) {
  std::vector<HostCopy> copies;
  copies.reserve(blocks.size() * geometry_.extents_per_page);
  {
    const std::lock_guard lock(mutex_);
    if (Status usable = refuse_if_failed(); !usable) return usable;
    for (const BlockRecord& block : blocks) {
      if (Status mapped = refuse_unmapped(block.id); !mapped) return mapped;
      std::byte* record = block.record;
      for (std::uint64_t e = 0; e < geometry_.extents_per_page; ++e) {
        copies.push_back({address_ + geometry_.block_offset(block.id, e, 0), record,
                          geometry_.block_bytes, geometry_.buffers_per_extent,
                          geometry_.blocks_per_page * geometry_.block_bytes});
        record += geometry_.buffers_per_extent * geometry_.block_bytes;
      }
    }
  }
  return driver_->copy_host(copies, to);
}

Result<std::vector<Handle>> Range::handles(std::span<const PageIndex> pages) {
  std::vector<Handle> found;
  found.reserve(pages.size() * geometry_.extents_per_page);
  const std::lock_guard lock(mutex_);
  if (Status usable = refuse_if_failed(); !usable) return usable.error();
  for (const PageIndex page : pages) {
    if (page >= geometry_.pages || mapped_[page] == 0) {
      return Error{Errc::kInvalidArgument,
                   "page " + std::to_string(page) + " is not mapped, so nothing can be exported"};
    }
    for (std::uint64_t e = 0; e < geometry_.extents_per_page; ++e) {
      found.push_back(handles_[page * geometry_.extents_per_page + e]);
    }
  }
  for (const PageIndex page : pages) mapped_[page] = kExported;
  return found;
}

Status Range::ring_at_unmap(int bell) {
  const int own = ::fcntl(bell, F_DUPFD_CLOEXEC, 0);
  if (own < 0) {
    return Error{Errc::kMapping, std::string("duplicating an eventfd failed: ") +
                                     std::strerror(errno) + "; raise `ulimit -n`"};
  }
  const std::lock_guard lock(mutex_);
  if (bell_ >= 0) ::close(bell_);
  bell_ = own;
  return ok();
}

std::vector<PageIndex> Range::take_unmapped() {
  const std::lock_guard lock(mutex_);
  return std::exchange(unmapped_, {});
}

Status Range::unmap_extents(std::span<const PageIndex> pages) {
  std::vector<std::pair<PageIndex, std::size_t>> runs;
  (void)for_each_run(pages, [&](PageIndex first, std::size_t count) {
    runs.emplace_back(first, count);
    return ok();
  });
  for (std::size_t step = 0; step < runs.size() * geometry_.extents_per_page; ++step) {
    const auto [first, count] = runs[step / geometry_.extents_per_page];
    Status unmapped = driver_->unmap(extent_address(first, step % geometry_.extents_per_page),
                                     count * geometry_.extent_bytes);
    if (unmapped) continue;
    // Map again what this batch has unmapped; the handles still hold the contents.
    for (std::size_t back = 0; back < step; ++back) {
      const auto [run_first, run_count] = runs[back / geometry_.extents_per_page];
      const std::uint64_t extent = back % geometry_.extents_per_page;
      bool restored = true;
      for (PageIndex page = run_first; page < run_first + run_count && restored; ++page) {
        restored = static_cast<bool>(driver_->map(extent_address(page, extent),
                                                  geometry_.extent_bytes, handle_of(page, extent)));
      }
      restored =
          restored && static_cast<bool>(driver_->set_access(extent_address(run_first, extent),
                                                            run_count * geometry_.extent_bytes));
      if (!restored) {
        mark_failed();
        return Error{Errc::kPoolFailed, "a failed unmap could not be undone (" +
                                            unmapped.error().message +
                                            "); restart the engine to use the pool again"};
      }
    }
    return unmapped;
  }
  return ok();
}

Status Range::check_batch(std::span<const PageIndex> pages, bool must_be_mapped) const {
  std::vector<PageIndex> sorted(pages.begin(), pages.end());
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    const PageIndex page = sorted[i];
    if (page >= geometry_.pages) {
      return Error{Errc::kInvalidArgument, "page " + std::to_string(page) + " is outside the " +
                                               std::to_string(geometry_.pages) +
                                               " pages of the range"};
    }
    if (i > 0 && sorted[i - 1] == page) {
      return Error{Errc::kInvalidArgument,
                   "page " + std::to_string(page) + " is named twice in one batch"};
    }
    if ((mapped_[page] != 0) != must_be_mapped) {
      return Error{Errc::kInvalidArgument,
                   "page " + std::to_string(page) +
                       (must_be_mapped ? " is not mapped" : " is mapped already")};
    }
  }
  return ok();
}

Status Range::refuse_if_failed() const {
  if (!failed()) return ok();
  return Error{Errc::kPoolFailed,
               "an earlier driver failure could not be undone; restart the engine to use the pool"};
}

bool Range::is_mapped(PageIndex page) const {
  const std::lock_guard lock(mutex_);
  return page < geometry_.pages && mapped_[page] != 0;
}

std::uint32_t Range::generation(PageIndex page) const {
  const std::lock_guard lock(mutex_);
  return page < geometry_.pages ? generations_[page] : 0;
}

std::vector<std::uint32_t> Range::generations(std::span<const PageIndex> pages) const {
  std::vector<std::uint32_t> found;
  found.reserve(pages.size());
  for (const PageIndex page : pages) found.push_back(generation(page));
  return found;
}

std::uint64_t Range::held_bytes() const {
  return mapped_pages() * geometry_.page_bytes() + store_.recycled() * geometry_.extent_bytes;
}

Status Range::check_integrity() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t counted = 0;
  for (std::size_t page = 0; page < mapped_.size(); ++page) counted += mapped_[page] != 0;
  if (counted != mapped_pages()) {
    return Error{Errc::kIntegrity, "the page table has " + std::to_string(counted) +
                                       " mapped pages, the counter says " +
                                       std::to_string(mapped_pages())};
  }
  return ok();
}

}  // namespace kvelastic
