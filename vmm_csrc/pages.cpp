#include "pages.h"

namespace kvelastic {

Status PageStore::acquire(std::span<Handle> out) {
  std::size_t have = 0;
  {
    const std::lock_guard lock(mutex_);
    while (have < out.size() && !recycled_.empty()) {
      out[have++] = recycled_.back();
      recycled_.pop_back();
    }
  }
  for (; have < out.size(); ++have) {
    Result<Handle> created = driver_->create(handle_bytes_);
    if (!created) {
      recycle(out.first(have));
      return created.error();
    }
    out[have] = *created;
  }
  return ok();
}

void PageStore::recycle(std::span<const Handle> handles) {
  const std::lock_guard lock(mutex_);
  // Last in, first out: the page used last is the likeliest to be in a cache.
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
