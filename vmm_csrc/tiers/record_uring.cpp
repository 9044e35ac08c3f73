#include "tiers/record_uring.h"

#include <cerrno>

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif

#if defined(IORING_OFF_SQES)

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "tiers/record_transfer.h"

// Old C headers lack these numbers, which are the same on every architecture.
#ifndef __NR_io_uring_setup
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#endif

namespace kvelastic {
namespace {

/// Memory shared with the kernel; the destructor unmaps it.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, std::size_t bytes, std::uint64_t at)
      : start_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                      static_cast<off_t>(at))),
        bytes_(bytes) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (is_there()) ::munmap(start_, bytes_);
  }

  bool is_there() const { return start_ != MAP_FAILED; }
  template <typename T>
  T* at(std::uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<std::byte*>(start_) + offset);
  }

 private:
  void* start_ = MAP_FAILED;
  std::size_t bytes_ = 0;
};

/// One submission and one completion queue, for one thread at a time.
class Ring {
 public:
  /// Returns null, with `why` set to an errno, if io_uring is not available.
  static std::unique_ptr<Ring> create(unsigned depth, int& why);
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (fd_ >= 0) ::close(fd_);
  }

  void run(Way way, std::span<RecordPiece> pieces);

 private:
  Ring(int fd, const io_uring_params& params, unsigned depth)
      : fd_(fd),
        params_(params),
        submissions_(fd, params.sq_off.array + params.sq_entries * sizeof(std::uint32_t),
                     IORING_OFF_SQ_RING),
        completions_(fd, params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe),
                     IORING_OFF_CQ_RING),
        entries_(fd, params.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES),
        lanes_(depth) {}

  bool is_there() const {
    return submissions_.is_there() && completions_.is_there() && entries_.is_there();
  }
  /// Adds one entry to the queue; enter() submits it.
  void push(const io_uring_sqe& entry);
  void push(std::size_t lane);
  /// Submits the queue and waits for `wait_for` completions. Returns 0 or an errno. Entries that
  /// the kernel does not take stay in the queue.
  int enter(unsigned wait_for);
  bool pop(io_uring_cqe& out);
  /// Waits for one completion despite errors, because the kernel may still use the caller's memory.
  io_uring_cqe wait();
  bool answers_a_nop(int& why);

  const int fd_;
  const io_uring_params params_;
  Mapping submissions_;
  Mapping completions_;
  Mapping entries_;
  std::vector<RecordTransfer> lanes_;
  unsigned pushed_ = 0;  // not submitted yet
};

std::unique_ptr<Ring> Ring::create(unsigned depth, int& why) {
  io_uring_params params{};
  const auto fd = static_cast<int>(::syscall(__NR_io_uring_setup, depth, &params));
  if (fd < 0) {
    why = errno;
    return nullptr;
  }
  std::unique_ptr<Ring> ring(new Ring(fd, params, depth));
  if (!ring->is_there()) {
    why = ENOMEM;
    return nullptr;
  }
  return ring->answers_a_nop(why) ? std::move(ring) : nullptr;
}

/// True if the ring completes a no-op: some seccomp filters allow the setup but refuse later calls.
bool Ring::answers_a_nop(int& why) {
  io_uring_sqe nop{};
  nop.opcode = IORING_OP_NOP;
  push(nop);
  why = enter(1);
  io_uring_cqe answer{};
  if (why != 0) return false;
  answer = wait();
  why = -answer.res;
  return answer.res >= 0;
}

void Ring::push(const io_uring_sqe& entry) {
  const std::uint32_t mask = *submissions_.at<std::uint32_t>(params_.sq_off.ring_mask);
  const std::atomic_ref<std::uint32_t> tail(*submissions_.at<std::uint32_t>(params_.sq_off.tail));
  const std::uint32_t at = tail.load(std::memory_order_relaxed);
  entries_.at<io_uring_sqe>(0)[at & mask] = entry;
  submissions_.at<std::uint32_t>(params_.sq_off.array)[at & mask] = at & mask;
  tail.store(at + 1, std::memory_order_release);
  ++pushed_;
}

void Ring::push(std::size_t lane) {
  RecordTransfer& transfer = lanes_[lane];
  io_uring_sqe entry{};
  entry.opcode = transfer.way() == Way::kRead ? IORING_OP_READV : IORING_OP_WRITEV;
  entry.fd = transfer.fd();
  entry.off = transfer.offset();
  entry.addr = reinterpret_cast<std::uint64_t>(transfer.next());
  entry.len = 1;
  entry.user_data = lane;
  push(entry);
}

int Ring::enter(unsigned wait_for) {
  const unsigned flags = wait_for > 0 ? IORING_ENTER_GETEVENTS : 0;
  const long taken =
      ::syscall(__NR_io_uring_enter, fd_, pushed_, wait_for, flags, nullptr, std::size_t{0});
  if (taken < 0) return errno;
  pushed_ -= static_cast<unsigned>(taken);
  return 0;
}

bool Ring::pop(io_uring_cqe& out) {
  const std::uint32_t mask = *completions_.at<std::uint32_t>(params_.cq_off.ring_mask);
  const std::atomic_ref<std::uint32_t> head(*completions_.at<std::uint32_t>(params_.cq_off.head));
  const std::atomic_ref<std::uint32_t> tail(*completions_.at<std::uint32_t>(params_.cq_off.tail));
  const std::uint32_t at = head.load(std::memory_order_relaxed);
  if (at == tail.load(std::memory_order_acquire)) return false;
  out = completions_.at<io_uring_cqe>(params_.cq_off.cqes)[at & mask];
  head.store(at + 1, std::memory_order_release);
  return true;
}

io_uring_cqe Ring::wait() {
  using namespace std::chrono_literals;
  io_uring_cqe answer{};
  while (!pop(answer)) {
    const int failed = enter(1);
    // The kernel is busy or briefly out of memory. A ring that works gets no other error.
    if (failed != 0 && failed != EINTR) std::this_thread::sleep_for(1ms);
  }
  return answer;
}

void Ring::run(Way way, std::span<RecordPiece> pieces) {
  std::size_t next = 0;
  std::size_t under_way = 0;
  // Starts pieces in this lane until one is in flight. A piece that fails at once has ended.
  const auto fill = [&](std::size_t lane) {
    while (next < pieces.size()) {
      lanes_[lane].begin(way, pieces[next++]);
      if (lanes_[lane].ended()) continue;
      push(lane);
      ++under_way;
      // Submit at once, so that the disk works while the next piece's checksum is computed. wait()
      // submits entries that the kernel does not take now.
      (void)enter(0);
      return;
    }
  };
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) fill(lane);
  while (under_way > 0) {
    const io_uring_cqe answer = wait();
    const auto lane = static_cast<std::size_t>(answer.user_data);
    lanes_[lane].moved(answer.res);
    if (!lanes_[lane].ended()) {
      push(lane);
      continue;
    }
    --under_way;
    fill(lane);
  }
}

/// One ring per concurrent call, up to kMaxRings; further calls wait. The mutex guards the idle
/// rings.
class UringEngine final : public RecordEngine {
 public:
  UringEngine(std::unique_ptr<Ring> first, unsigned depth) : depth_(depth) {
    idle_.push_back(std::move(first));
  }

  std::string_view name() const override { return "io_uring"; }

  void run(Way way, std::span<RecordPiece> pieces) override {
    if (pieces.empty()) return;
    std::unique_ptr<Ring> ring = take();
    ring->run(way, pieces);
    {
      const std::lock_guard lock(mutex_);
      idle_.push_back(std::move(ring));
    }
    returned_.notify_one();
  }

 private:
  static constexpr unsigned kMaxRings = 8;

  std::unique_ptr<Ring> take() {
    std::unique_lock lock(mutex_);
    if (idle_.empty() && rings_ < kMaxRings) {
      int why = 0;
      if (auto ring = Ring::create(depth_, why)) {
        ++rings_;
        return ring;
      }
    }
    returned_.wait(lock, [this] { return !idle_.empty(); });
    std::unique_ptr<Ring> ring = std::move(idle_.back());
    idle_.pop_back();
    return ring;
  }

  const unsigned depth_;
  std::mutex mutex_;
  std::condition_variable returned_;
  std::vector<std::unique_ptr<Ring>> idle_;
  unsigned rings_ = 1;
};

}  // namespace

std::unique_ptr<RecordEngine> make_uring_engine(unsigned depth, int& why) {
  std::unique_ptr<Ring> first = Ring::create(depth, why);
  if (first == nullptr) return nullptr;
  return std::make_unique<UringEngine>(std::move(first), depth);
}

}  // namespace kvelastic

#else

namespace kvelastic {

std::unique_ptr<RecordEngine> make_uring_engine(unsigned, int& why) {
  why = ENOSYS;
  return nullptr;
}

}  // namespace kvelastic

#endif
