// How much stays free, and what is given back where less is left.
#include <vector>

#include "check.h"
#include "pool/memory_relief.h"

namespace kvelastic {
namespace {

using std::chrono::milliseconds;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;

/// Of 1 GiB: its margin is 32 MiB.
HostMemory::Room small_room(std::uint64_t left_mib) {
  return {"a cgroup", kGiB, left_mib * kMiB};
}

const HostMemory::Room kWideRoom{"the machine", 64 * kGiB, 32 * kGiB};

bool is(const Relief& relief, std::uint64_t mib, std::uint64_t urgent_mib) {
  return relief.bytes == mib * kMiB && relief.urgent_bytes == urgent_mib * kMiB;
}

Relief of(std::vector<HostMemory::Room> rooms, std::uint64_t transient_mib) {
  return relief(rooms, transient_mib * kMiB);
}

milliseconds look(std::vector<HostMemory::Room> rooms, std::uint64_t transient_mib) {
  return std::chrono::duration_cast<milliseconds>(next_look_in(rooms, transient_mib * kMiB));
}

TEST(enough_free_memory_needs_no_relief) {
  CHECK(is(of({}, 100), 0, 0));
  CHECK(is(of({kWideRoom}, 1000), 0, 0));
  CHECK(is(of({small_room(32)}, 0), 0, 0));
  CHECK(is(of({small_room(132)}, 100), 0, 0));
}

TEST(below_margin_releases_cache_then_blocks_in_use) {
  CHECK(is(of({small_room(31)}, 0), 1, 0));
  CHECK(is(of({small_room(16)}, 0), 16, 0));
  CHECK(is(of({small_room(15)}, 0), 17, 1));
  CHECK(is(of({small_room(0)}, 0), 32, 16));
}

TEST(recent_transient_memory_is_kept_free) {
  CHECK(is(of({small_room(31)}, 100), 101, 85));
  CHECK(is(of({small_room(131)}, 100), 1, 0));
}

TEST(tightest_memory_bound_decides_relief) {
  CHECK(is(of({kWideRoom, small_room(30), small_room(12)}, 0), 20, 4));
  CHECK(is(of({small_room(12), small_room(30), kWideRoom}, 0), 20, 4));
}

TEST(poll_interval_shrinks_with_free_memory) {
  CHECK(look({}, 0) == milliseconds(2000));
  CHECK(look({kWideRoom}, 0) == milliseconds(2000));
  CHECK(look({small_room(0)}, 0) == milliseconds(200));
  const HostMemory::Room middle{"the machine", 64 * kGiB, 8 * kGiB + 256 * kMiB};
  CHECK(look({middle}, 0) == milliseconds(1024));
  CHECK(look({middle}, 4 * 1024) == milliseconds(512));
  CHECK(look({middle, small_room(100)}, 0) == milliseconds(200));
}

TEST(released_memory_counts_as_transient) {
  TransientMemory memory;
  CHECK(memory.now_bytes() == 0 && memory.recent_bytes() == 0);
  for (const std::uint64_t held : {500, 700, 510}) memory.see(held, true);
  CHECK(memory.now_bytes() == 190);
  CHECK(memory.recent_bytes() == 200);
  memory.see(700, true);
  CHECK(memory.now_bytes() == 0);
  CHECK(memory.recent_bytes() == 200);
}

TEST(old_growth_is_not_transient) {
  TransientMemory memory;
  memory.see(100, true);
  for (int look = 0; look < 16; ++look) memory.see(500 + look % 2 * 30, true);
  CHECK(memory.recent_bytes() == 30);
}

TEST(peak_expires_after_busy_not_idle_samples) {
  TransientMemory memory;
  memory.see(900, true);
  for (std::uint64_t look = 0; look < 3 * TransientMemory::kWindowLooks; ++look) {
    memory.see(500, false);
  }
  CHECK(memory.now_bytes() == 400);
  for (std::uint64_t look = 0; look < TransientMemory::kWindowLooks - 1; ++look) {
    memory.see(500, true);
  }
  CHECK(memory.now_bytes() == 400);
  for (std::uint64_t look = 0; look < TransientMemory::kWindowLooks + 1; ++look) {
    memory.see(500, true);
  }
  CHECK(memory.now_bytes() == 0);
}

}  // namespace
}  // namespace kvelastic
