#include "visible_devices.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "machine.h"

namespace kvsim {
namespace {

/// Indices as the driver reads them: up to the first that is none; one named twice hides them all.
/// UUIDs are not read here.
std::vector<int> read() {
  const int all = Machine::instance().devices();
  std::vector<int> devices;
  const char* variable = std::getenv("CUDA_VISIBLE_DEVICES");
  if (variable == nullptr) {
    for (int device = 0; device < all; ++device) devices.push_back(device);
    return devices;
  }
  std::string_view text(variable);
  while (!text.empty()) {
    int device = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), device);
    if (error != std::errc() || device < 0 || device >= all) break;
    if (std::find(devices.begin(), devices.end(), device) != devices.end()) return {};
    devices.push_back(device);
    text.remove_prefix(static_cast<std::size_t>(end - text.data()));
    if (!text.empty() && text.front() != ',') break;
    if (!text.empty()) text.remove_prefix(1);
  }
  return devices;
}

const std::vector<int>& devices() {
  static const auto* const seen = new std::vector<int>(read());
  return *seen;
}

}  // namespace

int visible_devices() {
  return static_cast<int>(devices().size());
}

bool is_device(CUdevice device) {
  return device >= 0 && device < visible_devices();
}

int physical_device(CUdevice device) {
  return devices()[static_cast<std::size_t>(device)];
}

CUdevice visible_device(int physical) {
  const auto found = std::find(devices().begin(), devices().end(), physical);
  return found == devices().end() ? -1 : static_cast<CUdevice>(found - devices().begin());
}

}  // namespace kvsim
