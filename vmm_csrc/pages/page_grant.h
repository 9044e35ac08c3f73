// The grant that a range holds for its pages. The ledger implements it, so that ranges do not
// depend on the ledger.
#pragma once

#include <cstdint>

namespace kvelastic {

class PageGrant {
 public:
  virtual ~PageGrant() = default;
  /// Announces that these pages are about to be returned. Call it before the driver has them.
  virtual void leaving(std::uint64_t pages, std::uint64_t page_bytes) = 0;
  /// Returns the whole grant to the device.
  virtual void leave() = 0;
  /// The driver kept memory: the grant stays until the processes that hold it have ended.
  virtual void linger() = 0;
};

}  // namespace kvelastic
