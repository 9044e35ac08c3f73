#include "driver/guard_driver.h"

#include <algorithm>
#include <string>

namespace kvelastic {

GuardDriver::~GuardDriver() {
  if (scratch_) (void)inner_->destroy(*scratch_, page_bytes_);
}

Result<std::byte*> GuardDriver::reserve(std::size_t bytes) {
  if (bytes == 0 || bytes % page_bytes_ != 0) {
    return Error{Errc::kInvalidArgument, "reserve: " + std::to_string(bytes) +
                                             " bytes are not whole pages of " +
                                             std::to_string(page_bytes_)};
  }
  Result<std::byte*> address = inner_->reserve(bytes);
  if (!address) return address;
  Status guarded = keep_scratch();
  if (guarded) {
    guarded = guard(*address, bytes);
    if (guarded) return address;
    drop_scratch();
  }
  if (inner_->release(*address, bytes)) note(*address, bytes, false);
  return guarded.error();
}

Status GuardDriver::release(std::byte* address, std::size_t bytes) {
  if (Status bare = unguard(address, bytes); !bare) return bare;
  if (Status released = inner_->release(address, bytes); !released) return released;
  note(address, bytes, false);
  drop_scratch();
  return ok();
}

Status GuardDriver::map(std::byte* address, std::size_t bytes, Handle handle) {
  if (bytes != page_bytes_) {
    return Error{Errc::kInvalidArgument, "map: the pages here are of " +
                                             std::to_string(page_bytes_) + " bytes, not of " +
                                             std::to_string(bytes)};
  }
  if (Status bare = unguard(address, bytes); !bare) return bare;
  Status mapped = inner_->map(address, bytes, handle);
  if (mapped) {
    note(address, bytes, false);
  } else {
    (void)guard(address, bytes);
  }
  return mapped;
}

Status GuardDriver::unmap(std::byte* address, std::size_t bytes) {
  if (Status unmapped = inner_->unmap(address, bytes); !unmapped) return unmapped;
  (void)guard(address, bytes);
  return ok();
}

/// Creates the scratch page with the first range.
Status GuardDriver::keep_scratch() {
  const std::lock_guard lock(mutex_);
  if (!scratch_) {
    Result<Handle> created = inner_->create(page_bytes_);
    if (!created) return created.error();
    scratch_ = *created;
  }
  ++ranges_;
  return ok();
}

/// Counts a released range; destroys the scratch page with the last one.
void GuardDriver::drop_scratch() {
  const std::lock_guard lock(mutex_);
  if (--ranges_ > 0) return;
  if (inner_->destroy(*scratch_, page_bytes_)) scratch_.reset();
}

/// Maps the scratch page at every address of the range, or at none.
Status GuardDriver::guard(std::byte* address, std::size_t bytes) {
  std::size_t done = 0;
  Status guarded = ok();
  while (guarded && done < bytes) {
    guarded = inner_->map(address + done, page_bytes_, *scratch_);
    if (guarded) done += page_bytes_;
  }
  if (guarded) guarded = inner_->set_access(address, bytes);
  if (guarded) {
    note(address, bytes, false);
    return ok();
  }
  // A scratch page that cannot be unmapped stays without access: it faults as a bare address does.
  const bool undone = done == 0 || inner_->unmap(address, done);
  note(address, done, undone);
  note(address + done, bytes - done, true);
  return guarded;
}

/// Unmaps the scratch page from every address of the range.
Status GuardDriver::unguard(std::byte* address, std::size_t bytes) {
  for (std::size_t done = 0; done < bytes;) {
    const std::size_t run = covered_run(address + done, bytes - done);
    if (run > 0) {
      if (Status unmapped = inner_->unmap(address + done, run); !unmapped) return unmapped;
      note(address + done, run, true);
    }
    done += run + page_bytes_;  // a run ends at a bare page or at the end
  }
  return ok();
}

void GuardDriver::note(std::byte* address, std::size_t bytes, bool bare) {
  const std::lock_guard lock(mutex_);
  for (std::size_t done = 0; done < bytes; done += page_bytes_) {
    if (bare) {
      bare_.insert(address + done);
    } else {
      bare_.erase(address + done);
    }
  }
}

/// Returns how many bytes from `address` on are covered by scratch.
std::size_t GuardDriver::covered_run(std::byte* address, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto next = bare_.lower_bound(address);
  if (next == bare_.end()) return bytes;
  return std::min<std::size_t>(static_cast<std::size_t>(*next - address), bytes);
}

}  // namespace kvelastic
