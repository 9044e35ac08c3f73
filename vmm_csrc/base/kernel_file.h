// The small text files in which the kernel says how things are: /proc, memory cgroups.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace kvelastic {

/// An open file that is read from its start again and again; closed with it.
class KernelFile {
 public:
  explicit KernelFile(const std::string& path);
  KernelFile(KernelFile&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  KernelFile(const KernelFile&) = delete;
  KernelFile& operator=(const KernelFile&) = delete;
  ~KernelFile();

  bool is_open() const { return fd_ >= 0; }
  /// Its first 16 KiB as they are now; empty where it cannot be read.
  std::string read() const;

 private:
  int fd_;
};

/// The number at the start of a text, after blanks; none where there is none.
std::optional<std::uint64_t> number_in(std::string_view text);

/// The number after `key` and a blank at the start of a line; none where there is none.
std::optional<std::uint64_t> field_in(std::string_view text, std::string_view key);

}  // namespace kvelastic
