// Every call, counted in this process and written to a file that processes may share.
#pragma once

#include <cstdint>

#include "api.h"

namespace kvsim {

/// Counts one finished call and, under KVSIM_TRACE, appends "function result microseconds pid".
/// One write a line: lines of several threads and processes do not mix.
void trace_call(Function function, CUresult result, std::uint64_t took_us);

/// Calls of this process since it started or since reset_counts().
std::uint64_t calls_of(Function function);
std::uint64_t calls_of_all();  ///< questions (api.h) left out
void reset_counts();

}  // namespace kvsim
