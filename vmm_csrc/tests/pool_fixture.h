// Pages of one buffer, and memory for them; shared by the tests of pools.
#pragma once

#include <array>
#include <cstddef>
#include <memory>

#include "check.h"
#include "driver/host_driver.h"
#include "pages/range.h"
#include "segment/control_block.h"

namespace kvelastic {

/// Pages that the blocks of one buffer fill.
inline Geometry one_buffer(std::uint64_t pages, std::uint64_t blocks_per_page,
                           std::uint64_t page_bytes = HostDriver::kGranularityBytes) {
  Geometry made;
  made.pages = pages;
  made.extent_bytes = page_bytes;
  made.block_bytes = page_bytes / blocks_per_page;
  made.blocks_per_page = blocks_per_page;
  return made;
}

/// A segment in plain memory, aligned as a mapping is.
struct Segment {
  alignas(4096) std::array<std::byte, kSegmentBytes> bytes{};
  std::unique_ptr<ControlBlockOwner> owner;

  Segment() {
    ControlBlockIdentity identity;
    identity.devices = {{"host", 1}};
    auto made = ControlBlockOwner::create(bytes, identity);
    if (made) owner = *std::move(made);
  }
};

/// Addresses in this process for these pages, which are host memory.
inline std::shared_ptr<Range> host_range(const Geometry& geometry) {
  auto driver = HostDriver::open();
  if (!CHECK(driver)) return nullptr;
  auto range = Range::reserve(*std::move(driver), geometry);
  if (!CHECK(range)) return nullptr;
  return *std::move(range);
}

}  // namespace kvelastic
