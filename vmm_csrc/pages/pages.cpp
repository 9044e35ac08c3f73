#include "pages/pages.h"

namespace kvelastic {

Result<std::size_t> PageStore::acquire(std::span<Handle> out) {
  std::size_t have = 0;
  {
    const std::lock_guard lock(mutex_);
    while (have < out.size() && !recycled_.empty()) {
      out[have++] = recycled_.back();
      recycled_.pop_back();
    }
  }
  const std::size_t recycled = have;
  for (; have < out.size(); ++have) {
    Result<Handle> created = driver_->create(handle_bytes_);
    if (!created) {
      give_up(out.first(have), recycled);
      return created.error();
    }
    out[have] = *created;
  }
  return recycled;
}

void PageStore::give_up(std::span<const Handle> handles, std::size_t recycled) {
  recycle(handles.first(recycled));
  // A handle that cannot be destroyed is kept as recycled, so its bytes stay counted.
  (void)destroy(handles.subspan(recycled));
}

void PageStore::recycle(std::span<const Handle> handles) {
  const std::lock_guard lock(mutex_);
  // Last in, first out: the most recently used page is the likeliest to be in a cache.
  recycled_.insert(recycled_.end(), handles.rbegin(), handles.rend());
}

Status PageStore::destroy(std::span<const Handle> handles) {
  Status first_failure;
  for (const Handle handle : handles) {
    Status destroyed = driver_->destroy(handle, handle_bytes_);
    if (destroyed) continue;
    recycle({&handle, 1});
    if (first_failure) first_failure = destroyed;
  }
  return first_failure;
}

Status PageStore::trim() {
  std::vector<Handle> handles;
  {
    const std::lock_guard lock(mutex_);
    handles.swap(recycled_);
  }
  return destroy(handles);
}

std::uint64_t PageStore::recycled() const {
  const std::lock_guard lock(mutex_);
  return recycled_.size();
}

}  // namespace kvelastic
