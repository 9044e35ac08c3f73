#include "machine.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "machine_file.h"
#include "settings.h"

namespace kvsim {
namespace {

// What an exported descriptor says: its file position, which travels with it between processes.
// 24 bits of head and 19 of generation stay below the largest position of every file system.
constexpr unsigned kHeadBits = 24;
constexpr std::uint32_t kGenerationMask = 0x7ffff;

off_t token(Head head, std::uint32_t generation) {
  return static_cast<off_t>((std::uint64_t{generation & kGenerationMask} << kHeadBits) | head);
}

}  // namespace

bool Machine::lock() {
  const int error = ::pthread_mutex_lock(&header_->mutex);
  if (error == 0) return true;
  if (error != EOWNERDEAD) {
    complain(std::string("the machine's mutex is lost: ") + std::strerror(error));
    return false;
  }
  repair();
  ::pthread_mutex_consistent(&header_->mutex);
  return true;
}

void Machine::unlock() {
  ::pthread_mutex_unlock(&header_->mutex);
}

// A process died inside the lock. Heads with a count stand; granules that belong to none are free.
void Machine::repair() {
  for (int d = 0; d < devices_; ++d) header_->used_granules[d] = 0;
  const std::uint32_t all = static_cast<std::uint32_t>(devices_) * granules_each_;
  for (std::uint32_t i = 0; i < all; ++i) {
    Granule& granule = granules_[i];
    if (granule.head_plus_one == 0) continue;
    if (granules_[granule.head_plus_one - 1].count == 0) {
      punch(i);
      granule.head_plus_one = 0;
    } else {
      ++header_->used_granules[i / granules_each_];
    }
  }
  header_->orphans = 1;  // at least: the next reap() counts them
}

CUresult Machine::create(int device, std::size_t bytes, bool rdma, bool exportable, Head* head) {
  const std::size_t wanted = bytes / granule_bytes_;
  if (!lock()) return CUDA_ERROR_UNKNOWN;
  const auto free = [&] { return granules_each_ - header_->used_granules[device]; };
  if (free() < wanted) reap();
  if (free() < wanted) {
    unlock();
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  const std::uint32_t begin = static_cast<std::uint32_t>(device) * granules_each_;
  std::uint32_t at = header_->next_granule[device];
  std::uint32_t last = 0;
  std::size_t found = 0;
  while (found < wanted) {
    const std::uint32_t i = begin + at;
    at = (at + 1) % granules_each_;
    if (granules_[i].head_plus_one != 0) continue;
    if (found == 0) {
      *head = i;
      granules_[i] = Granule{i + 1, 0, 0, 0, ++header_->generation, 0, 0};
    } else {
      granules_[i] = Granule{*head + 1, 0, 0, 0, 0, 0, 0};
      granules_[last].next_plus_one = i + 1;
    }
    last = i;
    ++found;
  }
  header_->next_granule[device] = at;
  header_->used_granules[device] += wanted;
  Granule& first = granules_[*head];
  first.holders = std::uint64_t{1} << slot_;
  first.flags = (rdma ? kRdma : 0) | (exportable ? kExportable : 0);
  std::atomic_ref(first.count).store(static_cast<std::uint32_t>(wanted), std::memory_order_release);
  unlock();
  if (settings().poison && !poison(*head)) {
    drop(*head);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  return CUDA_SUCCESS;
}

void Machine::drop(Head head) {
  if (!lock()) return;
  Granule& first = granules_[head];
  first.holders &= ~(std::uint64_t{1} << slot_);
  if (first.holders == 0) {
    if (exported_alive(head)) {
      ++header_->orphans;
    } else {
      free_chain(head);
    }
  }
  unlock();
}

void Machine::free_chain(Head head) {
  Granule& first = granules_[head];
  const std::uint32_t count = first.count;
  std::atomic_ref(first.count).store(0, std::memory_order_release);
  std::uint32_t at = head;
  for (std::uint32_t i = 0; i < count; ++i) {
    punch(at);
    const std::uint32_t next = granules_[at].next_plus_one;
    granules_[at].head_plus_one = 0;
    at = next - 1;
  }
  header_->used_granules[head / granules_each_] -= count;
}

// Free memory is a hole: it reads as zeros and costs the host nothing.
void Machine::punch(std::uint32_t granule) {
  const auto offset = static_cast<off_t>(data_offset_ + granule * granule_bytes_);
  const auto bytes = static_cast<off_t>(granule_bytes_);
  if (::fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes) == 0) return;
  const std::vector<char> zeros(granule_bytes_);  // a file system without holes
  (void)!::pwrite(fd_, zeros.data(), zeros.size(), offset);
}

// Written through the file, not through a mapping: a full file system is an error and no SIGBUS.
bool Machine::poison(Head head) {
  const std::vector<char> pattern(granule_bytes_, static_cast<char>(0xA5));
  for (const Extent& extent : extents(head)) {
    for (std::size_t done = 0; done < extent.bytes; done += granule_bytes_) {
      const ssize_t wrote =
          ::pwrite(fd_, pattern.data(), pattern.size(), static_cast<off_t>(extent.offset + done));
      if (wrote != static_cast<ssize_t>(pattern.size())) return false;
    }
  }
  return true;
}

std::vector<Extent> Machine::extents(Head head) const {
  std::vector<Extent> found;
  std::uint32_t at = head;
  for (std::uint32_t i = 0; i < granules_[head].count; ++i) {
    const std::uint64_t offset = data_offset_ + std::uint64_t{at} * granule_bytes_;
    if (!found.empty() && found.back().offset + found.back().bytes == offset) {
      found.back().bytes += granule_bytes_;
    } else {
      found.push_back({offset, granule_bytes_});
    }
    at = granules_[at].next_plus_one - 1;
  }
  return found;
}

std::size_t Machine::bytes(Head head) const {
  return granules_[head].count * granule_bytes_;
}
int Machine::device(Head head) const {
  return static_cast<int>(head / granules_each_);
}
bool Machine::rdma(Head head) const {
  return (granules_[head].flags & kRdma) != 0;
}
bool Machine::exportable(Head head) const {
  return (granules_[head].flags & kExportable) != 0;
}

// A descriptor of its own on the same file carries a lock on the byte that is the head's number.
// The kernel keeps that lock for as long as any copy of the descriptor is open, also one that is
// under way in a socket, and anybody can ask whether it is there.
CUresult Machine::export_fd(Head head, int* fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd_);
  const int made = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (made < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  struct flock hold{};
  hold.l_type = F_RDLCK;
  hold.l_whence = SEEK_SET;
  hold.l_start = head;
  hold.l_len = 1;
  if (!lock()) {
    ::close(made);
    return CUDA_ERROR_UNKNOWN;
  }
  const bool held = ::fcntl(made, F_OFD_SETLK, &hold) == 0 &&
                    ::lseek(made, token(head, granules_[head].generation), SEEK_SET) >= 0;
  if (held) granules_[head].flags |= kExported;
  unlock();
  if (!held) {
    ::close(made);
    return CUDA_ERROR_OPERATING_SYSTEM;
  }
  *fd = made;
  return CUDA_SUCCESS;
}

CUresult Machine::import_fd(int fd, Head* head) {
  struct stat theirs{}, ours{};
  if (::fstat(fd, &theirs) != 0 || ::fstat(fd_, &ours) != 0) return CUDA_ERROR_INVALID_VALUE;
  if (theirs.st_dev != ours.st_dev || theirs.st_ino != ours.st_ino) return CUDA_ERROR_INVALID_VALUE;
  const off_t position = ::lseek(fd, 0, SEEK_CUR);
  const auto at = static_cast<Head>(position & ((std::uint64_t{1} << kHeadBits) - 1));
  if (position < 0 || at >= static_cast<std::uint32_t>(devices_) * granules_each_) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!lock()) return CUDA_ERROR_UNKNOWN;
  Granule& first = granules_[at];
  const bool valid =
      first.count > 0 && token(at, first.generation) == position && (first.flags & kExported) != 0;
  if (valid) {
    if (first.holders == 0 && header_->orphans > 0) --header_->orphans;
    first.holders |= std::uint64_t{1} << slot_;
    *head = at;
  }
  unlock();
  return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

bool Machine::exported_alive(Head head) const {
  if ((granules_[head].flags & kExported) == 0) return false;
  struct flock ask{};
  ask.l_type = F_WRLCK;
  ask.l_whence = SEEK_SET;
  ask.l_start = head;
  ask.l_len = 1;
  return ::fcntl(fd_, F_OFD_GETLK, &ask) == 0 && ask.l_type != F_UNLCK;
}

// Lets go for processes that died, those of `dead` among them, and frees what no descriptor holds
// any more.
void Machine::reap(std::uint64_t dead) {
  const bool linger = !settings().linger.empty() && ::access(settings().linger.c_str(), F_OK) == 0;
  for (int i = 0; i < kMaxProcesses && !linger; ++i) {
    Slot& slot = header_->slots[i];
    if (slot.process.pid == 0 || i == slot_ || is_alive(slot.process)) continue;
    dead |= std::uint64_t{1} << i;
  }
  if (dead == 0 && header_->orphans == 0) return;
  std::uint32_t orphans = 0;
  const std::uint32_t all = static_cast<std::uint32_t>(devices_) * granules_each_;
  for (std::uint32_t i = 0; i < all; ++i) {
    Granule& first = granules_[i];
    if (first.head_plus_one != i + 1 || first.count == 0) continue;
    first.holders &= ~dead;
    if (first.holders != 0) continue;
    if (exported_alive(i)) {
      ++orphans;
    } else {
      free_chain(i);
    }
  }
  header_->orphans = orphans;
  for (int i = 0; i < kMaxProcesses; ++i) {
    if ((dead >> i & 1) != 0) header_->slots[i] = Slot{};
  }
}

void Machine::drop_all() {
  const std::uint64_t own = std::uint64_t{1} << slot_;
  const std::uint32_t all = static_cast<std::uint32_t>(devices_) * granules_each_;
  std::vector<Head> held;
  if (!lock()) return;
  for (std::uint32_t i = 0; i < all; ++i) {
    const Granule& first = granules_[i];
    if (first.head_plus_one == i + 1 && (first.holders & own) != 0) held.push_back(i);
  }
  unlock();
  for (const Head head : held) drop(head);
}

std::size_t Machine::used_bytes(int device) {
  if (!lock()) return 0;
  reap();
  const std::size_t used = header_->used_granules[device] * granule_bytes_;
  unlock();
  return used;
}

std::size_t Machine::process_bytes(int device, int pid) {
  if (!lock()) return 0;
  reap();
  std::uint64_t bit = 0;
  for (int i = 0; i < kMaxProcesses; ++i) {
    if (header_->slots[i].process.pid == pid) bit = std::uint64_t{1} << i;
  }
  std::size_t held = 0;
  const std::uint32_t begin = static_cast<std::uint32_t>(device) * granules_each_;
  for (std::uint32_t i = begin; i < begin + granules_each_; ++i) {
    const Granule& first = granules_[i];
    if (first.head_plus_one == i + 1 && (first.holders & bit) != 0) held += first.count;
  }
  unlock();
  return held * granule_bytes_;
}

CUresult Machine::attach() {
  const ProcessIdentity self = this_process();
  if (!lock()) return CUDA_ERROR_UNKNOWN;
  std::uint64_t before_exec = 0;  // this process, when it was another program
  for (int i = 0; i < kMaxProcesses; ++i) {
    const ProcessIdentity& process = header_->slots[i].process;
    const bool same = process.pid == self.pid && process.start_ticks == self.start_ticks;
    if (same) before_exec |= std::uint64_t{1} << i;
  }
  reap(before_exec);
  for (int i = 0; i < kMaxProcesses && slot_ < 0; ++i) {
    if (header_->slots[i].process.pid != 0) continue;
    header_->slots[i].process = self;
    slot_ = i;
  }
  unlock();
  if (slot_ >= 0) return CUDA_SUCCESS;
  complain("more than " + std::to_string(kMaxProcesses) + " processes on one simulated machine");
  return CUDA_ERROR_OUT_OF_MEMORY;
}

}  // namespace kvsim
