#include "tiers/record_threads.h"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "tiers/record_transfer.h"

namespace kvelastic {
namespace {

void carry_out(RecordTransfer& transfer, Way way, RecordPiece& piece) {
  transfer.begin(way, piece);
  while (!transfer.ended()) {
    const auto offset = static_cast<off_t>(transfer.offset());
    iovec* part = transfer.next();
    const ssize_t moved = way == Way::kRead ? ::preadv(transfer.fd(), part, 1, offset)
                                            : ::pwritev(transfer.fd(), part, 1, offset);
    transfer.moved(moved < 0 ? -static_cast<std::int64_t>(errno) : moved);
  }
}

}  // namespace

ThreadEngine::ThreadEngine(unsigned depth)
    : threads_wanted_(std::min(depth, kMaxThreads) - 1) {}  // and the caller

ThreadEngine::~ThreadEngine() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  more_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadEngine::start_threads() {
  try {
    while (threads_.size() < threads_wanted_) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    // No more threads for this process: those that there are, and the caller, do it.
  }
}

void ThreadEngine::run(Way way, std::span<RecordPiece> pieces) {
  if (pieces.empty()) return;
  Batch batch{way, pieces};
  std::unique_lock lock(mutex_);
  if (pieces.size() > 1) {
    start_threads();
    batches_.push_back(&batch);
    more_.notify_all();
  }
  help(batch, lock);
  batch.whole.wait(lock, [&] { return batch.ended == batch.pieces.size(); });
}

void ThreadEngine::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    more_.wait(lock, [this] { return ending_ || !batches_.empty(); });
    if (ending_) return;
    help(*batches_.front(), lock);
  }
}

void ThreadEngine::help(Batch& batch, std::unique_lock<std::mutex>& lock) {
  RecordTransfer transfer;
  // The batch is its caller's, who leaves when all pieces have ended: not touched after the last.
  while (batch.next < batch.pieces.size()) {
    const std::size_t mine = batch.next++;
    if (batch.next == batch.pieces.size()) std::erase(batches_, &batch);
    lock.unlock();
    carry_out(transfer, batch.way, batch.pieces[mine]);
    lock.lock();
    if (++batch.ended == batch.pieces.size()) {
      batch.whole.notify_all();
      return;
    }
  }
}

}  // namespace kvelastic
