// Waits on a 32-bit word in memory that processes share.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace kvelastic {

using FutexWord = std::atomic<std::uint32_t>;
static_assert(sizeof(FutexWord) == sizeof(std::uint32_t) && FutexWord::is_always_lock_free);

/// A timeout that never passes.
inline constexpr std::chrono::nanoseconds kForever = std::chrono::nanoseconds::max();

/// Blocks while `word` holds `seen`, until the word is woken or `timeout` has passed. May return
/// early, so the caller must check its condition again. Never fails.
void futex_wait(const FutexWord& word, std::uint32_t seen, std::chrono::nanoseconds timeout);

/// Wakes all waiters on `word`, in every process.
void futex_wake(const FutexWord& word);

/// Changes the bell's value and wakes its waiters. One system call.
inline void ring_bell(FutexWord& bell) {
  bell.fetch_add(1, std::memory_order_release);
  futex_wake(bell);
}

}  // namespace kvelastic
