#include "host_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <sstream>
#include <string_view>

#include "size_text.h"

namespace kvelastic {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
/// A limit from here on is none: v1 writes "no limit" as a number near 2^63.
constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 60;
/// Of a credit: what one look may be good for.
constexpr std::uint64_t kCreditShare = 8;

std::optional<std::uint64_t> number_at(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

/// The number after `key` at the start of a line; 0 where there is none.
std::uint64_t field(std::string_view text, std::string_view key) {
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view line = text.substr(at, text.find('\n', at) - at);
    if (line.starts_with(key) && line.size() > key.size() && line[key.size()] == ' ') {
      return number_at(line.substr(key.size())).value_or(0);
    }
    at += line.size() + 1;
  }
  return 0;
}

}  // namespace

PolledFile::PolledFile(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}

PolledFile::~PolledFile() {
  if (fd_ >= 0) ::close(fd_);
}

std::string PolledFile::read() const {
  std::array<char, 16384> text{};
  const ssize_t length = fd_ < 0 ? -1 : ::pread(fd_, text.data(), text.size(), 0);
  return length <= 0 ? std::string() : std::string(text.data(), static_cast<std::size_t>(length));
}

HostMemory::HostMemory(const std::string& root) : meminfo_(root + "/proc/meminfo") {
  std::istringstream lines(PolledFile(root + "/proc/self/cgroup").read());
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

/// In a container the path may be the host's and not be there; its top still is.
void HostMemory::add_groups(const std::string& top, const std::string& path, bool is_v2) {
  const auto add = [&](const std::string& folder) {
    Group group{folder,
                PolledFile(folder + (is_v2 ? "/memory.max" : "/memory.limit_in_bytes")),
                PolledFile(folder + (is_v2 ? "/memory.current" : "/memory.usage_in_bytes")),
                PolledFile(folder + "/memory.stat"),
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

std::uint64_t HostMemory::Room::spare_bytes() const {
  return left_bytes > margin_bytes() ? left_bytes - margin_bytes() : 0;
}

std::vector<HostMemory::Room> HostMemory::look() const {
  std::vector<Room> rooms;
  for (const Group& group : groups_) {
    const auto limit = number_at(group.limit.read());
    if (!limit || *limit >= kNoLimit) continue;
    const std::uint64_t used = number_at(group.usage.read()).value_or(0);
    // Of the cache in use the kernel gets half without making everybody read it again at once.
    const std::string stat = group.stat.read();
    const std::uint64_t cache = field(stat, group.inactive) + field(stat, group.active) / 2;
    const std::uint64_t fixed = used > cache ? used - cache : 0;
    rooms.push_back({group.where, *limit, *limit > fixed ? *limit - fixed : 0});
  }
  const std::string machine = meminfo_.read();
  if (const std::uint64_t total = field(machine, "MemTotal:") * 1024; total > 0) {
    rooms.push_back({"the machine", total, field(machine, "MemAvailable:") * 1024});
  }
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
  if (tightest.spare_bytes() / 2 >= bytes) {
    credit_bytes_ = (tightest.spare_bytes() - bytes) / kCreditShare;
    return ok();
  }
  return Error{Errc::kOutOfMemory,
               "a page of " + size_text(bytes) + " is not created: " + tightest.where + " has " +
                   size_text(tightest.left_bytes) + " of " + size_text(tightest.total_bytes) +
                   " left, and " + size_text(tightest.margin_bytes()) +
                   " and another page's worth stay free, or the kernel would kill a process; "
                   "lower KVELASTIC_HOST_MEMORY or the limits, or give it more memory"};
}

}  // namespace kvelastic
