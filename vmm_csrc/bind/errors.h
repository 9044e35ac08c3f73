// Converts native results to the exceptions of kvelastic/errors.py.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>  // else raise_code differs between files, and the linker keeps one

#include <string>

#include "base/status.h"
#include "bind/gil.h"

namespace kvelastic {

/// Raises the Python exception for an error code. The GIL must be held.
[[noreturn]] inline void raise_code(const char* code, const std::string& message) {
  nanobind::object error =
      nanobind::module_::import_("kvelastic.errors").attr("native_error")(code, message);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  throw nanobind::python_error();
}

[[noreturn]] inline void raise_error(const Error& error) {
  raise_code(std::string(code_name(error.code)).c_str(), error.message);
}

inline void check(const Status& status) {
  if (!status) raise_error(status.error());
}

template <typename T>
T unwrap(Result<T> result) {
  if (!result) raise_error(result.error());
  return *std::move(result);
}

/// Runs `work` without the GIL and returns its result with the GIL held.
template <typename F>
auto without_gil(F work) {
  const GilReleased unlocked;
  return work();
}

/// Returns `object` in the process that created it. Raises DeviceUnavailableError in a forked
/// child.
template <typename T>
T& in_owner(T& object) {
  if (!object.made_by().is_this()) check(object.made_by().refuse_in_a_child());
  return object;
}

}  // namespace kvelastic
