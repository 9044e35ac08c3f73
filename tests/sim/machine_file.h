// What lies at the front of a machine's file. Only machine*.cpp read it.
#pragma once

#include <pthread.h>

#include <cstdint>

#include "machine.h"
#include "process_identity.h"

namespace kvsim {

inline constexpr std::uint64_t kMagic = 0x31304d495356454bULL;  // "KEVSIM01"

/// One process that uses the machine; its number is its bit in Granule::holders.
struct Slot {
  ProcessIdentity process;  // pid 0: free
};

struct Header {
  std::uint64_t magic;  // written last: a file with it is complete
  std::uint32_t devices;
  std::uint32_t granules_each;
  std::uint64_t granule_bytes;
  std::uint64_t data_offset;
  pthread_mutex_t mutex;  // robust, shared by processes; all below and every Granule
  std::uint32_t generation;
  std::uint32_t orphans;  // heads that nobody holds but exported descriptors
  std::uint64_t used_granules[Machine::kMaxDevices];
  std::uint32_t next_granule[Machine::kMaxDevices];  // where the search for free ones goes on
  Slot slots[Machine::kMaxProcesses];
};

/// `head_plus_one` of a free granule is 0. The last four belong to the head alone. `count` decides:
/// a head with count 0 is no allocation, whatever else a process that died has left there.
struct Granule {
  std::uint32_t head_plus_one;
  std::uint32_t next_plus_one;
  std::uint64_t holders;
  std::uint32_t count;
  std::uint32_t generation;
  std::uint32_t flags;
  std::uint32_t unused;
};

inline constexpr std::uint32_t kRdma = 1;
inline constexpr std::uint32_t kExportable = 2;
inline constexpr std::uint32_t kExported = 4;

}  // namespace kvsim
