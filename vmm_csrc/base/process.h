// Telling a live process from a dead one whose number was given to another.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>

namespace kvelastic {

/// When process `pid` started, in clock ticks since boot (field 22 of /proc/PID/stat); none if
/// there is no such process, or if it is a zombie: dead, and only not waited for.
std::optional<std::uint64_t> process_start_ticks(pid_t pid);

/// Whether the process that had this number and start is gone for certain (a zombie is). One that
/// cannot be looked at, because no file can be opened, say, is not known to be gone.
bool process_is_gone(pid_t pid, std::uint64_t start_ticks);

/// Whether the process that had this number and start can be seen to run. False is no proof of the
/// opposite: /proc may not show it.
bool process_is_seen(pid_t pid, std::uint64_t start_ticks);

/// The inode of this process's pid namespace; 0 where /proc does not say.
std::uint64_t own_pid_namespace();

}  // namespace kvelastic
