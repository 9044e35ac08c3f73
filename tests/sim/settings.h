// What the environment asks for, read once at the library's first call. README.md has every name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvsim {

struct Settings {
  std::string machine;            ///< KVSIM_MACHINE; empty: a machine of this process alone
  std::size_t memory_bytes;       ///< KVSIM_MEMORY, of each device
  std::size_t granularity_bytes;  ///< KVSIM_GRANULARITY
  int devices;                    ///< KVSIM_DEVICES
  int mig;                        ///< KVSIM_MIG
  int driver_version;             ///< KVSIM_DRIVER_VERSION
  int compute_capability;         ///< KVSIM_COMPUTE_CAPABILITY: 90 is 9.0
  bool no_vmm;                    ///< KVSIM_NO_VMM
  bool no_device;                 ///< KVSIM_NO_DEVICE
  bool rdma;                      ///< KVSIM_RDMA
  bool poison;                    ///< KVSIM_POISON
  bool unreadable;                ///< KVSIM_UNREADABLE
  bool strict_context;            ///< KVSIM_STRICT_CONTEXT
  std::size_t context_bytes;      ///< KVSIM_CONTEXT_BYTES
  std::size_t growth_bytes;       ///< KVSIM_CONTEXT_GROWTH
  std::size_t max_mappings;       ///< KVSIM_MAX_MAPPINGS
  std::size_t oom_at_bytes;       ///< KVSIM_OOM_AT_BYTES
  std::string oom_at_create;      ///< KVSIM_OOM_AT_CREATE
  std::string not_ready;          ///< KVSIM_NOT_READY
  std::string fail;               ///< KVSIM_FAIL
  std::string delay;              ///< KVSIM_DELAY
  std::string profile;            ///< KVSIM_PROFILE
  std::string trace;              ///< KVSIM_TRACE
  std::string hold;               ///< KVSIM_HOLD
  std::size_t queue;              ///< KVSIM_QUEUE
  std::uint64_t lag;              ///< KVSIM_LAG, in looks
  std::string linger;             ///< KVSIM_LINGER
};

/// A value that does not parse is said on stderr, once, and its default stands: the library never
/// ends a process.
const Settings& settings();

/// "2M", "1G", "4096": false when the text is no size.
bool parse_bytes(const std::string& text, std::size_t* bytes);

/// One line on stderr that begins with "kvsim: ".
void complain(const std::string& message);

}  // namespace kvsim
