// Waiting on a 32-bit word that lies in memory shared between processes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace kvelastic {

using FutexWord = std::atomic<std::uint32_t>;
static_assert(sizeof(FutexWord) == sizeof(std::uint32_t) && FutexWord::is_always_lock_free);

/// A deadline of "never".
inline constexpr std::chrono::nanoseconds kForever = std::chrono::nanoseconds::max();

/// Sleeps while `word` holds `seen`, until somebody wakes the word or `timeout` has passed. May
/// return early for no reason: the caller looks at its condition again. Never fails.
void futex_wait(const FutexWord& word, std::uint32_t seen, std::chrono::nanoseconds timeout);

/// Wakes every sleeper on `word`, in whichever process.
void futex_wake(const FutexWord& word);

/// Changes a bell's value and wakes who waits for that. One system call.
inline void ring_bell(FutexWord& bell) {
  bell.fetch_add(1, std::memory_order_release);
  futex_wake(bell);
}

}  // namespace kvelastic
