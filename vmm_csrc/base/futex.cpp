#include "base/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace kvelastic {

// Not FUTEX_PRIVATE_FLAG: the words lie in shared memory, and the waiter may be in another process.

void futex_wait(const FutexWord& word, std::uint32_t seen, std::chrono::nanoseconds timeout) {
  timespec limit{};
  timespec* limit_or_never = nullptr;
  if (timeout != kForever) {
    if (timeout <= std::chrono::nanoseconds::zero()) return;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
    limit.tv_sec = seconds.count();
    limit.tv_nsec = static_cast<long>((timeout - seconds).count());
    limit_or_never = &limit;
  }
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, limit_or_never, nullptr, 0);
}

void futex_wake(const FutexWord& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace kvelastic
