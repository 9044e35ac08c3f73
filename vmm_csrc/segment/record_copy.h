#pragma once

#include <cstddef>
#include <span>

namespace kvelastic {

/// Copies the record at the start of an open file to `out`: as much of kRecordBytes as the file and
/// `out` have; the rest of `out` stays as it is. Each latch's newest value is whole unless its
/// writer was faster than kLatchReadTries looks. Returns 0 or errno. Any thread, any process.
///
/// For a file that others may shorten at any moment: a mapping of it would be a SIGBUS then.
int copy_record(int fd, std::span<std::byte> out);

}  // namespace kvelastic
