// Small text files in which the kernel reports its state: /proc and memory cgroups.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace kvelastic {

/// An open file that can be read repeatedly. The destructor closes it.
class KernelFile {
 public:
  explicit KernelFile(const std::string& path);
  KernelFile(KernelFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  KernelFile(const KernelFile&) = delete;
  KernelFile& operator=(const KernelFile&) = delete;
  ~KernelFile();

  bool is_open() const { return fd_ >= 0; }
  /// Returns the first 16 KiB of the current contents; empty if the file cannot be read.
  std::string read() const;

 private:
  int fd_;
};

/// Returns the number at the start of `text`, after blanks; empty if there is no number.
std::optional<std::uint64_t> number_in(std::string_view text);

/// Returns the number after `key` and a blank at the start of a line; empty if no line matches.
std::optional<std::uint64_t> field_in(std::string_view text, std::string_view key);

}  // namespace kvelastic
