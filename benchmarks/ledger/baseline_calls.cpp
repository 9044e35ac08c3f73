// What a ledger could cost otherwise: two atomic adds that look at nothing (the floor), and a sum
// under a mutex of shared memory that survives its holder's death (the baseline).
#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <new>

namespace {

struct Shared {
  alignas(64) pthread_mutex_t mutex;
  alignas(64) std::uint64_t granted;             // under the mutex
  alignas(64) std::atomic<std::uint64_t> adds;   // no mutex
  alignas(64) std::atomic<std::uint64_t> total;  // what all takers say they hold
};

Shared* shared(void* at) {
  return static_cast<Shared*>(at);
}

double now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<double>(std::chrono::nanoseconds(now).count());
}

void lock(pthread_mutex_t& mutex) {
  if (pthread_mutex_lock(&mutex) == EOWNERDEAD) pthread_mutex_consistent(&mutex);
}

}  // namespace

extern "C" {

std::uint64_t shared_bytes() {
  return sizeof(Shared);
}

void make(void* at) {
  auto* made = new (at) Shared{};
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&made->mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

/// Mean ns of one add and one subtraction.
double two_adds_ns(void* at, std::uint64_t count) {
  const double start = now_ns();
  for (std::uint64_t i = 0; i < count; ++i) {
    shared(at)->adds.fetch_add(1);
    shared(at)->adds.fetch_sub(1);
  }
  return (now_ns() - start) / static_cast<double>(count);
}

/// Mean ns of taking one of `capacity` and giving it back, each under the mutex.
double mutex_ns(void* at, std::uint64_t capacity, std::uint64_t count) {
  Shared& here = *shared(at);
  const double start = now_ns();
  for (std::uint64_t i = 0; i < count; ++i) {
    lock(here.mutex);
    const bool got = here.granted < capacity;
    if (got) ++here.granted;
    pthread_mutex_unlock(&here.mutex);
    lock(here.mutex);
    if (got) --here.granted;
    pthread_mutex_unlock(&here.mutex);
  }
  return (now_ns() - start) / static_cast<double>(count);
}

/// What all hold after this one holds `more`; modulo 2^64, so that a loss may be added too.
std::uint64_t add_to_total(void* at, std::uint64_t more) {
  return shared(at)->total.fetch_add(more) + more;
}
}
