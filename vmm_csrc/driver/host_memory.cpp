#include "driver/host_memory.h"

#include <algorithm>
#include <optional>
#include <sstream>

#include "base/size_text.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
/// Larger values mean no limit: cgroup v1 reports "no limit" as a number near 2^63.
constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;
/// A check may be reused for 1/kCreditShare of the spare memory it found.
constexpr std::uint64_t kCreditShare = 8;

}  // namespace

HostMemory::HostMemory(const std::string& root) : meminfo_(root + "/proc/meminfo") {
  std::istringstream lines(KernelFile(root + "/proc/self/cgroup").read());
  for (std::string line; std::getline(lines, line);) {
    // "0::/a/b" is cgroup v2; "5:cpu,memory:/a/b" is v1.
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string path = line.substr(second + 1);
    if (second == first + 1) add_groups(root + "/sys/fs/cgroup", path, true);
    std::istringstream controllers(line.substr(first + 1, second - first - 1));
    for (std::string controller; std::getline(controllers, controller, ',');) {
      if (controller == "memory") add_groups(root + "/sys/fs/cgroup/memory", path, false);
    }
  }
}

/// In a container the path may be the host's and not exist; its root still does.
void HostMemory::add_groups(const std::string& top, const std::string& path, bool is_v2) {
  const auto add = [&](const std::string& folder) {
    Group group{folder,
                KernelFile(folder + (is_v2 ? "/memory.max" : "/memory.limit_in_bytes")),
                KernelFile(folder + (is_v2 ? "/memory.current" : "/memory.usage_in_bytes")),
                KernelFile(folder + "/memory.stat"),
                is_v2 ? "active_file" : "total_active_file",
                is_v2 ? "inactive_file" : "total_inactive_file"};
    if (group.limit.is_open() && group.usage.is_open()) groups_.push_back(std::move(group));
  };
  std::string folder = top;
  add(folder);
  std::istringstream parts(path);
  for (std::string part; std::getline(parts, part, '/');) {
    if (part.empty() || part == "..") continue;
    folder += "/" + part;
    add(folder);
  }
}

std::uint64_t HostMemory::Room::margin_bytes() const {
  return std::clamp(total_bytes / 32, 16 * kMiB, 256 * kMiB);
}

std::uint64_t HostMemory::Room::spare_bytes(std::uint64_t keep_free_bytes) const {
  const std::uint64_t kept = margin_bytes() + keep_free_bytes;
  return left_bytes > kept ? left_bytes - kept : 0;
}

std::vector<HostMemory::Room> HostMemory::look() const {
  std::vector<Room> rooms;
  for (const Group& group : groups_) {
    const auto limit = number_in(group.limit.read());
    if (!limit || *limit >= kNoLimit) continue;
    const std::uint64_t used = number_in(group.usage.read()).value_or(0);
    // Half of the active page cache can be reclaimed without causing an immediate re-read.
    const std::string stat = group.stat.read();
    const std::uint64_t cache =
        field_in(stat, group.inactive).value_or(0) + field_in(stat, group.active).value_or(0) / 2;
    const std::uint64_t fixed = used > cache ? used - cache : 0;
    rooms.push_back({group.where, *limit, *limit > fixed ? *limit - fixed : 0});
  }
  const std::string machine = meminfo_.read();
  const auto total = field_in(machine, "MemTotal:"), available = field_in(machine, "MemAvailable:");
  if (total && available) rooms.push_back({"the machine", *total * 1024, *available * 1024});
  std::stable_sort(rooms.begin(), rooms.end(),
                   [](const Room& a, const Room& b) { return a.spare_bytes() < b.spare_bytes(); });
  return rooms;
}

Status HostMemory::refuse_if_tight(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  if (bytes <= credit_bytes_ && now - looked_at_ < kFresh) {
    credit_bytes_ -= bytes;
    return ok();
  }
  const std::vector<Room> rooms = look();
  looked_at_ = now;
  credit_bytes_ = 0;
  if (rooms.empty()) return ok();
  const Room& tightest = rooms.front();
  const std::uint64_t keep_free = keep_free_bytes_.load(std::memory_order_relaxed);
  const std::uint64_t spare = tightest.spare_bytes(keep_free);
  if (spare / 2 >= bytes) {
    credit_bytes_ = (spare - bytes) / kCreditShare;
    return ok();
  }
  return Error{Errc::kOutOfMemory,
               "a page of " + size_text(bytes) + " is not created: " + tightest.where + " has " +
                   size_text(tightest.left_bytes) + " of " + size_text(tightest.total_bytes) +
                   " left, and " + size_text(tightest.margin_bytes() + keep_free) +
                   " and another page's worth stay free, or the kernel would kill a process; "
                   "lower KVELASTIC_HOST_MEMORY or the limits, or give it more memory"};
}

}  // namespace kvelastic
