#include "driver/driver.h"

#include "base/pauses.h"

namespace kvelastic {

Status Driver::drain() {
  Result<std::unique_ptr<Fence>> fence = this->fence();
  if (!fence) return fence.error();
  if (!*fence) return ok();
  // No deadline: a page must not be unmapped while a kernel uses it, however long that takes.
  for (PausesAfterSpin pauses(std::chrono::steady_clock::now());; pauses.take()) {
    const Result<bool> passed = (*fence)->has_passed();
    if (!passed) return passed.error();
    if (*passed) return ok();
  }
}

}  // namespace kvelastic
