// Python types of parameters and results that C++ types do not show: the stub has them, and no call
// checks more because of them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <vector>

namespace kvelastic {

/// A parameter of any type that integers_of() converts.
using Integers = nanobind::typed<nanobind::handle, std::vector<std::int64_t>>;
/// A result of list_of().
using IntegerList = nanobind::typed<nanobind::list, std::int64_t>;
using Counts = nanobind::typed<nanobind::dict, nanobind::str, std::uint64_t>;
/// Named values of several types.
using Fields = nanobind::typed<nanobind::dict, nanobind::str, nanobind::any>;

}  // namespace kvelastic
