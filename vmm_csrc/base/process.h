// Distinguishes a live process from a dead one whose pid was reused.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

namespace kvelastic {

/// Returns when process `pid` started, in clock ticks since boot (field 22 of /proc/PID/stat).
/// Empty if there is no such process or it is a zombie.
std::optional<std::uint64_t> process_start_ticks(pid_t pid);

/// True only if the process with this pid and start time has certainly ended (zombies included).
/// False if it cannot be determined, for example because no file can be opened.
bool process_is_gone(pid_t pid, std::uint64_t start_ticks);

/// True if /proc shows the process with this pid and start time running. False proves nothing:
/// /proc may hide the process.
bool process_is_seen(pid_t pid, std::uint64_t start_ticks);

/// Returns the inode of this process's pid namespace; 0 if /proc does not show it.
std::uint64_t own_pid_namespace();

}  // namespace kvelastic
