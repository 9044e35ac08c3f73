#include "ledger/device_account.h"

#include "base/size_text.h"

namespace kvelastic {

Status check_account(const DeviceMemorySize& size, std::uint64_t granted_bytes,
                     std::uint64_t guaranteed_bytes, std::uint64_t reserved_bytes) {
  const std::uint64_t left_bytes = size.left_for_caches(reserved_bytes);
  const auto broken = [&](const std::string& what, std::uint64_t bytes) {
    return Error{Errc::kIntegrity,
                 what + " add up to " + size_text(bytes) + ", and " + size_text(left_bytes) +
                     " of the device's " + size_text(size.capacity_bytes) +
                     " are left for caches beside " + size_text(reserved_bytes) + " reserved"};
  };
  if (granted_bytes > left_bytes) return broken("grants", granted_bytes);
  if (!size.has_room_for(guaranteed_bytes, reserved_bytes)) {
    return broken("guarantees", guaranteed_bytes);
  }
  return ok();
}

}  // namespace kvelastic
