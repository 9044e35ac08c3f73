// `kvelastic._vmm`: liveness locks, and waits for futex words that other processes change.
#include "bind/liveness.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <optional>

#include "base/futex.h"
#include "bind/buffers.h"
#include "bind/errors.h"
#include "bind/gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

/// The Python object. It can release the lock before it is destroyed.
struct PyLivenessLock {
  std::unique_ptr<LivenessLock> lock;
};

std::optional<std::shared_ptr<PyLivenessLock>> hold(const std::string& path, int fd,
                                                    std::uint64_t byte, bool children_keep) {
  auto attempt = unwrap(LivenessLock::hold(
      unwrap(LivenessFile::of(path, fd)), byte,
      children_keep ? LivenessLock::Children::kKeep : LivenessLock::Children::kDrop));
  switch (attempt.outcome) {
    case LivenessLock::Outcome::kTaken:
      raise_code("SEGMENT_BUSY", "byte " + std::to_string(byte) + " of " + path +
                                     " is held by another process that lives");
    case LivenessLock::Outcome::kNoLocks:
      return std::nullopt;
    case LivenessLock::Outcome::kHeld:
      break;
  }
  return std::make_shared<PyLivenessLock>(std::move(attempt.lock));
}

const char* liveness_of(int fd, std::uint64_t first, std::uint64_t count,
                        std::uint64_t pid_namespace,
                        const std::vector<std::pair<std::uint32_t, std::uint64_t>>& processes) {
  std::vector<ProcessStart> starts;
  for (const auto& [pid, ticks] : processes) starts.push_back({pid, ticks});
  return liveness_name(LivenessCheck(fd).query(first, count, pid_namespace, starts));
}

/// Returns a word in a mapped file, which only the kernel may access. If another process has
/// shortened the file, the kernel reports an error, but a load in this process would get SIGBUS.
const FutexWord& word_at(std::span<const std::byte> bytes, std::size_t offset) {
  if (offset % alignof(FutexWord) != 0 || offset + sizeof(FutexWord) > bytes.size()) {
    raise_code("INVALID_ARGUMENT", "no word lies at offset " + std::to_string(offset));
  }
  return *reinterpret_cast<const FutexWord*>(bytes.data() + offset);
}

}  // namespace

void bind_liveness(nb::module_& m) {
  nb::class_<PyLivenessLock>(
      m, "LivenessLock",
      "A liveness lock on one byte of a shared file; see vmm_csrc/base/liveness_lock.h.")
      .def_static("hold", &hold, "path"_a, "fd"_a, "byte"_a, nb::kw_only(),
                  "children_keep"_a = false,
                  "Lock the byte until release() or the end of this process. `fd` is an open file "
                  "descriptor of the file at `path`. With `children_keep`, a forked child keeps "
                  "the lock too. Returns None if the file system has no such locks. Raises "
                  "SegmentBusyError if the byte is already locked, or SegmentError.")
      .def(
          "release", [](PyLivenessLock& held) { held.lock.reset(); },
          "Release the byte. Idempotent; does nothing in a forked child.");
  m.def("liveness_of", &liveness_of, "fd"_a, "first_byte"_a, "count"_a = 1, nb::kw_only(),
        "pid_namespace"_a = 0,
        "processes"_a = std::vector<std::pair<std::uint32_t, std::uint64_t>>{},
        "Return \"alive\" if one of the bytes is locked, otherwise \"dead\", or \"unknown\" if "
        "that cannot be determined. `fd` must be a separate open file descriptor of the file, not "
        "that of the lock's holder. If one of `processes`, (pid, start ticks), is visible as "
        "running in its pid namespace, the result is \"alive\" in any case.");
  m.def(
      "wait_word",
      [](nb::handle buffer, std::size_t offset, std::uint32_t seen, double timeout_s) {
        Buffers buffers;
        const FutexWord& word = word_at(buffers.add(buffer, false), offset);
        const std::chrono::duration<double> timeout(timeout_s);
        const GilReleased unlocked;
        futex_wait(word, seen, std::chrono::duration_cast<std::chrono::nanoseconds>(timeout));
      },
      "buffer"_a, "offset"_a, "seen"_a, "timeout_s"_a,
      "Block while the 32-bit word at `offset` equals `seen`, until wake_word(), at most "
      "`timeout_s` seconds. May return early. The kernel reads the word, so a file that is too "
      "short ends the wait without an error.");
  m.def(
      "wake_word",
      [](nb::handle buffer, std::size_t offset) {
        Buffers buffers;
        futex_wake(word_at(buffers.add(buffer, false), offset));
      },
      "buffer"_a, "offset"_a, "Wake all processes that wait on this word of the file.");
}

}  // namespace kvelastic
