// Records by preadv and pwritev in a few threads: the engine that every system has.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "tiers/record_io.h"

namespace kvelastic {

/// The threads start with the first call. One lock, of the queue; none is taken under it, and none
/// is held while a file is read or written.
class ThreadEngine final : public RecordEngine {
 public:
  static constexpr unsigned kMaxThreads = 16;

  /// `depth` pieces of a call are under way at once, kMaxThreads at most.
  explicit ThreadEngine(unsigned depth);
  ~ThreadEngine() override;

  std::string_view name() const override { return "threads"; }
  /// The caller carries pieces out too, so it ends also where no thread can be started.
  void run(Way way, std::span<RecordPiece> pieces) override;

 private:
  struct Batch {
    Way way;
    std::span<RecordPiece> pieces;
    std::size_t next = 0;
    std::size_t ended = 0;
    std::condition_variable whole{};
  };

  void start_threads();
  void work();
  /// Carries out one piece after the other of a batch. `lock` is held before and after, and
  /// dropped meanwhile.
  void help(Batch& batch, std::unique_lock<std::mutex>& lock);

  const unsigned threads_wanted_;
  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<Batch*> batches_;  // those with pieces that nobody has begun
  std::vector<std::thread> threads_;
  bool ending_ = false;
};

}  // namespace kvelastic
