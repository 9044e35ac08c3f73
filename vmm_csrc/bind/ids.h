// Fast conversion of integers from Python: engines pass ids on their hot path.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "bind/errors.h"
#include "bind/signatures.h"
#include "pages/staging_window.h"

namespace kvelastic {

/// Converts a sequence of integers (list, tuple, range, NumPy array). Raises TypeError for anything
/// else, and OverflowError if an integer does not fit into 64 bits.
inline std::vector<std::int64_t> integers_of(nanobind::handle sequence) {
  PyObject* fast = PySequence_Fast(sequence.ptr(), "a sequence of integers is wanted");
  if (fast == nullptr) throw nanobind::python_error();
  const nanobind::object keep = nanobind::steal(fast);
  const bool is_list = PyList_Check(fast) != 0;  // else a tuple, as PySequence_Fast ensures
  std::vector<std::int64_t> out;
  out.reserve(static_cast<std::size_t>(Py_SIZE(fast)));
  // An item's __index__ may run Python code that changes this list. So each step reads the size and
  // the item again and holds a reference to the item. The NB_ names of nanobind are Python's
  // macros, or functions under the stable ABI, which lacks PySequence_Fast_GET_ITEM.
  for (Py_ssize_t i = 0; i < Py_SIZE(fast); ++i) {
    PyObject* item = is_list ? NB_LIST_GET_ITEM(fast, i) : NB_TUPLE_GET_ITEM(fast, i);
    std::int64_t value = 0;
    if (PyLong_CheckExact(item)) {
      value = PyLong_AsLongLong(item);
    } else {
      const nanobind::object held = nanobind::borrow(item);
      const nanobind::object index = nanobind::steal(PyNumber_Index(item));
      if (!index.is_valid()) throw nanobind::python_error();
      value = PyLong_AsLongLong(index.ptr());
    }
    if (value == -1 && PyErr_Occurred() != nullptr) throw nanobind::python_error();
    out.push_back(value);
  }
  return out;
}

/// Converts integers to a list, faster than nanobind converts a vector.
inline IntegerList list_of(const std::vector<std::int64_t>& values) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(values.size()));
  if (list == nullptr) throw nanobind::python_error();
  for (std::size_t i = 0; i < values.size(); ++i) {
    PyObject* value = PyLong_FromLongLong(values[i]);
    if (value == nullptr) {
      Py_DECREF(list);
      throw nanobind::python_error();
    }
    NB_LIST_SET_ITEM(list, static_cast<Py_ssize_t>(i), value);
  }
  return nanobind::steal<IntegerList>(list);
}

/// Converts a sequence of page indices. Raises InvalidArgumentError if one is out of bounds.
inline std::vector<std::uint32_t> pages_of(nanobind::handle sequence) {
  const std::vector<std::int64_t> wide = integers_of(sequence);
  std::vector<std::uint32_t> out;
  out.reserve(wide.size());
  for (const std::int64_t page : wide) {
    if (page < 0 || page > std::numeric_limits<std::uint32_t>::max()) {
      raise_code("INVALID_ARGUMENT",
                 std::to_string(page) + " is no page index; it must be 0 or more");
    }
    out.push_back(static_cast<std::uint32_t>(page));
  }
  return out;
}

/// Pairs blocks with slots of a staging. Raises InvalidArgumentError for unequal numbers.
inline std::vector<BlockSlot> block_slots_of(nanobind::handle ids, nanobind::handle slots) {
  const std::vector<std::int64_t> blocks = integers_of(ids);
  const std::vector<std::int64_t> slots_of_blocks = integers_of(slots);
  if (blocks.size() != slots_of_blocks.size()) {
    raise_code("INVALID_ARGUMENT", std::to_string(blocks.size()) + " blocks and " +
                                       std::to_string(slots_of_blocks.size()) +
                                       " slots; pass one for each");
  }
  std::vector<BlockSlot> out;
  out.reserve(blocks.size());
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    // Below 0: no such slot.
    out.push_back({blocks[i], static_cast<std::uint64_t>(slots_of_blocks[i])});
  }
  return out;
}

}  // namespace kvelastic
