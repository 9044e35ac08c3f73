#include "base/liveness_lock.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "base/descriptor.h"
#include "base/process.h"

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

namespace kvelastic {
namespace {

constexpr long kTmpfsMagic = 0x01021994;
constexpr int kOpenFlags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
/// Offset of byte 0: behind any byte of the file that a program might lock for its own purposes.
constexpr std::uint64_t kFirstOffset = std::uint64_t{1} << 40;

// Address window for the mappings: above the kernel's reserved area (vm.mmap_min_addr, usually 64
// KiB) and below every program, heap and library.
constexpr std::uintptr_t kLowestAddress = std::uintptr_t{64} << 10;
constexpr std::uintptr_t kHighestAddress = std::uintptr_t{16} << 20;

std::size_t system_page_bytes() {
  return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

struct flock lock_of(short type, std::uint64_t first, std::uint64_t count) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(kFirstOffset + first);
  lock.l_len = static_cast<off_t>(count);
  return lock;
}

bool is_tmpfs(int fd) {
  struct statfs state{};
  return ::fstatfs(fd, &state) == 0 && static_cast<long>(state.f_type) == kTmpfsMagic;
}

/// Returns a descriptor, or -1 with errno. ESTALE: the path now leads to another file.
int open_exactly(const LivenessFile& file, int flags) {
  const int fd = ::open(file.path.c_str(), flags | kOpenFlags);
  if (fd < 0) return -1;
  struct stat state{};
  if (::fstat(fd, &state) == 0 && state.st_dev == file.device && state.st_ino == file.inode) {
    return fd;
  }
  ::close(fd);
  errno = ESTALE;
  return -1;
}

void* map_low(int fd, std::size_t bytes) {
  for (std::uintptr_t at = kLowestAddress; at < kHighestAddress; at += bytes) {
    void* wanted = reinterpret_cast<void*>(at);  // NOLINT(performance-no-int-to-ptr)
    void* got = ::mmap(wanted, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED_NOREPLACE, fd, 0);
    if (got == wanted) return got;
    if (got != MAP_FAILED) {
      ::munmap(got, bytes);  // a kernel before 4.17 treats the address as a hint
    } else if (errno != EEXIST && errno != EPERM && errno != EACCES) {
      break;
    }
  }
  // The window is full. A higher address holds the lock as well, but the lock may be released
  // before the memory when the process ends.
  return ::mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, fd, 0);
}

Error refused(const LivenessFile& file, const char* what) {
  return {Errc::kSegment,
          "cannot " + std::string(what) + " " + file.path +
              ", by which others know that this process lives: " + std::strerror(errno)};
}

}  // namespace

Result<LivenessFile> LivenessFile::of(std::string path, int fd) {
  struct stat state{};
  if (::fstat(fd, &state) != 0) {
    return Error{Errc::kSegment, "cannot look at " + path + ": " + std::strerror(errno)};
  }
  return LivenessFile{std::move(path), state.st_dev, state.st_ino};
}

Result<LivenessLock::Attempt> LivenessLock::hold(const LivenessFile& file, std::uint64_t byte,
                                                 Children children) {
  const Descriptor fd(open_exactly(file, O_RDWR));
  if (fd.get() < 0) return refused(file, "open");
  if (!is_tmpfs(fd.get())) return Attempt{Outcome::kNoLocks, nullptr};
  struct flock lock = lock_of(F_WRLCK, byte, 1);
  if (::fcntl(fd.get(), F_OFD_SETLK, &lock) != 0) {
    if (errno == EAGAIN || errno == EACCES) return Attempt{Outcome::kTaken, nullptr};
    if (errno == EINVAL) return Attempt{Outcome::kNoLocks, nullptr};
    return refused(file, "lock");
  }
  void* mapping = map_low(fd.get(), system_page_bytes());
  if (mapping == MAP_FAILED) return refused(file, "map");
  std::unique_ptr<LivenessLock> held(new LivenessLock(mapping));
  if (children == Children::kDrop && ::madvise(mapping, system_page_bytes(), MADV_DONTFORK) != 0) {
    return refused(file, "keep children from");
  }
  return Attempt{Outcome::kHeld, std::move(held)};
}

LivenessLock::~LivenessLock() {
  // In a child, this address may hold another mapping, for example the child's own lock.
  if (!is_kept_ && held_by_.is_this()) ::munmap(mapping_, system_page_bytes());
}

LivenessCheck::LivenessCheck(int fd) : fd_(is_tmpfs(fd) ? fd : -1) {}

LivenessCheck::LivenessCheck(const LivenessFile& file)
    : owned_fd_(file.path.empty() ? -1 : open_exactly(file, O_RDONLY)),
      fd_(owned_fd_ >= 0 && is_tmpfs(owned_fd_) ? owned_fd_ : -1) {}

LivenessCheck::~LivenessCheck() {
  if (owned_fd_ >= 0) ::close(owned_fd_);
}

Liveness LivenessCheck::query(std::uint64_t first, std::uint64_t count) const {
  if (fd_ < 0) return Liveness::kUnknown;
  // Query as a reader: any process may take a read lock, and those of other users must not count.
  struct flock lock = lock_of(F_RDLCK, first, count);
  if (::fcntl(fd_, F_OFD_GETLK, &lock) != 0) return Liveness::kUnknown;
  return lock.l_type == F_UNLCK ? Liveness::kDead : Liveness::kAlive;
}

Liveness LivenessCheck::query(std::uint64_t first, std::uint64_t count, std::uint64_t pid_namespace,
                              std::span<const ProcessStart> processes) const {
  const Liveness liveness = query(first, count);
  if (liveness != Liveness::kDead || pid_namespace == 0 || pid_namespace != own_pid_namespace()) {
    return liveness;
  }
  const bool seen = std::ranges::any_of(processes, [](const ProcessStart& process) {
    return process_is_seen(static_cast<pid_t>(process.pid), process.start_ticks);
  });
  return seen ? Liveness::kAlive : Liveness::kDead;
}

}  // namespace kvelastic
