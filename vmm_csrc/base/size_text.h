// Formats byte counts as kvelastic.units.format_size does.
#pragma once

#include <cstdint>
#include <cstdio>
#include <iterator>
#include <string>

namespace kvelastic {

/// `512 B`, `1.50 GiB`.
inline std::string size_text(std::uint64_t bytes) {
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return std::to_string(bytes) + " B";
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  // Rounds as the output does: 1048575 bytes are 1.00 MiB, not 1024.00 KiB.
  for (; value >= 1023.995 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  char text[64];
  std::snprintf(text, sizeof text, "%.2f %s", value, kUnits[unit]);
  return text;
}

}  // namespace kvelastic
