#include "base/kernel_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>

namespace kvelastic {
namespace {

constexpr std::string_view kBlanks = " \t";

}  // namespace

KernelFile::KernelFile(const std::string& path) : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}

KernelFile::~KernelFile() {
  if (fd_ >= 0) ::close(fd_);
}

std::string KernelFile::read() const {
  std::array<char, 16384> text{};
  const ssize_t length = fd_ < 0 ? -1 : ::pread(fd_, text.data(), text.size(), 0);
  return length <= 0 ? std::string() : std::string(text.data(), static_cast<std::size_t>(length));
}

std::optional<std::uint64_t> number_in(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size()));
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

std::optional<std::uint64_t> field_in(std::string_view text, std::string_view key) {
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view line = text.substr(at, text.find('\n', at) - at);
    if (line.starts_with(key) && line.size() > key.size() &&
        kBlanks.find(line[key.size()]) != std::string_view::npos) {
      return number_in(line.substr(key.size()));
    }
    at += line.size() + 1;
  }
  return std::nullopt;
}

}  // namespace kvelastic
