// The grant that a range holds for its pages. The ledger implements it; a range knows no ledger.
#pragma once

#include <cstdint>

namespace kvelastic {

class PageGrant {
 public:
  virtual ~PageGrant() = default;
  /// The pages are about to be returned to the driver. Call it before the driver has them.
  virtual void leaving(std::uint64_t pages, std::uint64_t page_bytes) = 0;
  /// Returns the whole grant to the device.
  virtual void leave() = 0;
  /// The driver kept memory: the grant stays until the processes that hold it are gone.
  virtual void linger() = 0;
};

}  // namespace kvelastic
