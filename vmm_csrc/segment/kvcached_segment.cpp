#include "segment/kvcached_segment.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "base/debug_log.h"
#include "base/size_text.h"

namespace kvelastic {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kOpenFlags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
constexpr off_t kFileBytes = 24;
constexpr off_t kUsageOffset = 8;
/// The byte of the file's liveness lock.
constexpr std::uint64_t kMakerByte = 0;
/// The longest time between two looks, each of two system calls.
constexpr int kLookMs = 25;
/// The longest time until a name that inotify does not watch is looked up again.
constexpr std::chrono::milliseconds kNameInterval{250};

/// An exclusive flock(), if no other process holds it.
class FileLock {
 public:
  explicit FileLock(const Descriptor& file)
      : fd_(::flock(file.get(), LOCK_EX | LOCK_NB) == 0 ? file.get() : -1) {}
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  ~FileLock() {
    if (fd_ >= 0) ::flock(fd_, LOCK_UN);
  }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  const int fd_;
};

off_t size_of(int fd) {
  struct stat state{};
  return ::fstat(fd, &state) == 0 ? state.st_size : -1;
}

}  // namespace

Result<std::unique_ptr<KvcachedSegment>> KvcachedSegment::create(
    std::string path, const std::string& own_path,
    std::shared_ptr<ControlBlockOwner> control_block) {
  static_assert(sizeof(Values) == kFileBytes);
  std::unique_ptr<KvcachedSegment> segment(
      new KvcachedSegment(std::move(path), std::move(control_block)));
  segment->wake_ = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  segment->own_ = Descriptor(::open(own_path.c_str(), kOpenFlags));
  if (!segment->wake_.is_open() || !segment->own_.is_open()) return segment->failed("keep");
  if (Result<bool> opened = segment->open(); !opened) return opened.error();
  if (Status written = segment->write_all(segment->own_values()); !written) return written.error();
  return segment;
}

Status KvcachedSegment::start() {
  inotify_ = Descriptor(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK));
  if (!inotify_.is_open()) {
    Error error = failed("watch");
    error.message +=
        "; raise fs.inotify.max_user_instances, or set KVELASTIC_KVCACHED_SEGMENT=false";
    return error;
  }
  if (Status watched = watch(); !watched) return watched;
  {
    const FileLock lock(file_);
    Values seen;
    // A client has set the limit while the instance started.
    if (read(seen) && seen.limit_bytes != agreed_bytes_) agreed_bytes_ = own_values().limit_bytes;
    complain(look());
  }
  thread_ = std::thread(&KvcachedSegment::run, this);
  return ok();
}

void KvcachedSegment::close() {
  if (!created_by_.is_this()) {
    // A forked child inherits this object but not the thread.
    if (thread_.joinable()) thread_.detach();
    return;
  }
  if (thread_.joinable()) {
    stopping_ = true;
    wake();
    thread_.join();
  }
  remove();
  for (Descriptor* open : {&inotify_, &wake_, &own_}) *open = Descriptor();
}

// --- the thread --------------------------------------------------------------------------------

void KvcachedSegment::run() {
  std::array<pollfd, 2> waits{{{inotify_.get(), POLLIN, 0}, {wake_.get(), POLLIN, 0}}};
  Clock::time_point next_name;
  while (true) {
    const bool has_events = ::poll(waits.data(), waits.size(), kLookMs) > 0;
    if (stopping_) return;
    if (has_events) {
      for (const pollfd& wait : waits) {
        alignas(inotify_event) std::array<char, 4096> events;
        if (wait.revents != 0) (void)!::read(wait.fd, events.data(), events.size());
      }
    }
    // The instance works without the file, and tries again.
    try {
      Status kept;
      if (has_events || Clock::now() >= next_name) {
        next_name = Clock::now() + kNameInterval;
        kept = keep_name();
      }
      if (kept && file_.is_open()) kept = look();
      if (!kept || file_.is_open()) complain(kept);
    } catch (const std::bad_alloc&) {
    }
  }
}

/// Opens or creates the file again if the name does not refer to the open file.
Status KvcachedSegment::keep_name() {
  if (is_in_place()) return ok();
  release();
  const Result<bool> is_new = open();
  if (!is_new) return is_new.error();
  if (Status watched = watch(); !watched) return watched;
  // A client may have replaced the file by a new one, with a limit.
  if (*is_new) return write_all(own_values());
  publish_usage_to_file();
  return ok();
}

Status KvcachedSegment::look() {
  const Values own = own_values();
  Values seen;
  if (read(seen) && seen.limit_bytes == agreed_bytes_ && own.limit_bytes == agreed_bytes_) {
    // A client may have written old values back.
    if (seen.usage_bytes != own.usage_bytes) publish_usage_to_file();
    return ok();
  }
  const FileLock lock(file_);
  if (read(seen) && seen.limit_bytes > 0 && capped(seen.limit_bytes) != agreed_bytes_ &&
      own.limit_bytes == agreed_bytes_) {
    request(seen.limit_bytes, own.limit_bytes);
  } else if (lock) {
    return write_all(own);
  }
  publish_usage_to_file();
  return ok();
}

/// Requests a client's limit in the instance's own segment. If another writer holds that segment's
/// lock, or has just changed the limit, this has no effect, and the next look decides.
void KvcachedSegment::request(std::int64_t limit_bytes, std::int64_t own_limit_bytes) {
  const FileLock lock(own_);
  if (!lock || own_values().limit_bytes != own_limit_bytes) return;
  RequestChange change;
  change.limit_bytes = static_cast<std::uint64_t>(limit_bytes);
  (void)control_block_->writer().write(change);
  agreed_bytes_ = capped(limit_bytes);
  if (!info_logging()) return;
  info_log("A kvcached client has set the limit to %s, by %s.",
           size_text(*change.limit_bytes).c_str(), path_.c_str());
}

void KvcachedSegment::wake() const {
  (void)::eventfd_write(wake_.get(), 1);
}

void KvcachedSegment::complain(const Status& problem) {
  std::string message = problem ? std::string() : problem.error().message;
  if (!message.empty() && message != complained_ && warning_logging()) {
    warning_log("kvcached's segment is not kept: %s", message.c_str());
  }
  complained_ = std::move(message);
}

// --- values ------------------------------------------------------------------------------------

KvcachedSegment::Values KvcachedSegment::values_of(const Usage& usage) {
  const auto bytes = [](std::uint64_t value) {
    return static_cast<std::int64_t>(std::min(value, kUnlimitedBytes));
  };
  // A limit above the capacity means the same as the capacity, which may be unknown yet.
  const std::uint64_t most = usage.capacity_bytes > 0 ? usage.capacity_bytes : kUnlimitedBytes;
  return {bytes(std::min(usage.limit_bytes, most)),
          {bytes(usage.mapped_bytes - std::min(usage.parked_bytes, usage.mapped_bytes)),
           bytes(usage.parked_bytes)}};
}

/// Returns the file's values for the instance's state, including a pending limit.
KvcachedSegment::Values KvcachedSegment::own_values() const {
  const ControlBlockView control_block = control_block_->view();
  Ack ack;
  Request request;
  Usage usage;
  // The instance publishes usage before the acknowledgement, and this reads them in reverse order.
  // So a requested limit is either pending or included in the usage.
  (void)control_block.read_ack(ack);
  (void)control_block.read_request(request);
  (void)control_block.read_usage(usage);
  if (request.limit_revision > ack.revision) usage.limit_bytes = request.limit_bytes;
  return values_of(usage);
}

/// Returns a client's limit as the file shows it once it is in effect.
std::int64_t KvcachedSegment::capped(std::int64_t limit_bytes) const {
  Usage usage;
  (void)control_block_->view().read_usage(usage);
  usage.limit_bytes = static_cast<std::uint64_t>(limit_bytes);
  return values_of(usage).limit_bytes;
}

/// Returns false if the file does not have the right size.
bool KvcachedSegment::read(Values& out) const {
  std::array<char, kFileBytes + 1> bytes;
  if (::pread(file_.get(), bytes.data(), bytes.size(), 0) != kFileBytes) return false;
  std::memcpy(&out, bytes.data(), sizeof(out));
  return true;
}

/// Writes all values. A limit that a client has written is lost.
Status KvcachedSegment::write_all(const Values& own) {
  if (::pwrite(file_.get(), &own, sizeof(own), 0) != kFileBytes ||
      (size_of(file_.get()) > kFileBytes && ::ftruncate(file_.get(), kFileBytes) != 0)) {
    return failed("write");
  }
  agreed_bytes_ = own.limit_bytes;
  publish_usage_to_file();
  return ok();
}

/// Writes the usage to the open file, now and at each later publication that changes it. Does not
/// write beyond the end of a truncated file: the rest of a limit would look like a client's.
void KvcachedSegment::publish_usage_to_file() {
  control_block_->on_usage([this, fd = file_.get(),
                            shown = Values{agreed_bytes_, {-1, -1}}](const Usage& usage) mutable {
    const Values now = values_of(usage);
    if (now.limit_bytes != shown.limit_bytes) wake();
    if (now.usage_bytes != shown.usage_bytes && size_of(fd) == kFileBytes) {
      (void)!::pwrite(fd, now.usage_bytes.data(), sizeof(now.usage_bytes), kUsageOffset);
    }
    shown = now;
  });
}

// --- the file ----------------------------------------------------------------------------------

/// Returns true if the name still refers to the open file.
bool KvcachedSegment::is_in_place() const {
  struct stat named{};
  struct stat opened{};
  return file_.is_open() && ::lstat(path_.c_str(), &named) == 0 &&
         ::fstat(file_.get(), &opened) == 0 && named.st_dev == opened.st_dev &&
         named.st_ino == opened.st_ino;
}

/// Opens or creates the file, and takes its liveness lock. Returns true if it was created.
Result<bool> KvcachedSegment::open() {
  Descriptor file(::open(path_.c_str(), kOpenFlags | O_CREAT | O_EXCL, S_IRUSR | S_IWUSR));
  const bool is_new = file.is_open();
  if (!is_new) {
    if (errno != EEXIST) return failed("make");
    file = Descriptor(::open(path_.c_str(), kOpenFlags));
    struct stat state{};
    if (!file.is_open() || ::fstat(file.get(), &state) != 0) return taken(std::strerror(errno));
    if (!S_ISREG(state.st_mode) || state.st_size > kFileBytes || state.st_uid != ::geteuid()) {
      return taken("it is not kvcached's segment, or another user's");
    }
  }
  const Result<LivenessFile> at = LivenessFile::of(path_, file.get());
  if (!at) return at.error();
  Result<LivenessLock::Attempt> held =
      LivenessLock::hold(*at, kMakerByte, LivenessLock::Children::kDrop);
  if (!held) return held.error();
  if (held->outcome == LivenessLock::Outcome::kTaken) return taken("another instance keeps it");
  liveness_lock_ = std::move(held->lock);
  file_ = std::move(file);
  return is_new;
}

Status KvcachedSegment::watch() {
  // By descriptor, because the name may already refer to another file. The kernel removes a watch
  // together with its file. IN_ATTRIB also reports the removal of a name.
  const std::string opened = "/proc/self/fd/" + std::to_string(file_.get());
  if (::inotify_add_watch(inotify_.get(), opened.c_str(),
                          IN_CLOSE_WRITE | IN_ATTRIB | IN_MOVE_SELF) >= 0) {
    return ok();
  }
  Error error = failed("watch");
  error.message += "; raise fs.inotify.max_user_watches";
  return error;
}

void KvcachedSegment::release() {
  control_block_->on_usage(nullptr);
  liveness_lock_.reset();
  file_ = Descriptor();
}

void KvcachedSegment::remove() {
  if (is_in_place()) ::unlink(path_.c_str());
  release();
}

Error KvcachedSegment::failed(const char* what) const {
  return {Errc::kSegment,
          "cannot " + std::string(what) + " " + path_ + ": " + std::strerror(errno)};
}

Error KvcachedSegment::taken(const std::string& why) const {
  return {Errc::kSegmentExists, path_ + " cannot be kvcached's segment of this instance: " + why +
                                    "; remove it, or choose another KVCACHED_IPC_NAME"};
}

}  // namespace kvelastic
