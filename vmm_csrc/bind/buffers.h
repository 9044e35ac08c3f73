// Holds the buffers of Python objects for a native call.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>
#include <vector>

namespace kvelastic {

/// Holds buffers until it is destroyed, so that their memory is not moved or freed. Create, fill
/// and destroy it with the GIL held; the memory may be used without the GIL.
class Buffers {
 public:
  Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() {
    for (Py_buffer& held : held_) PyBuffer_Release(&held);
  }

  /// Adds an object's buffer and returns its memory. Raises the object's error: BufferError if the
  /// buffer is not contiguous, or is read-only despite `must_write`.
  std::span<std::byte> add(nanobind::handle object, bool must_write) {
    held_.emplace_back();
    if (PyObject_GetBuffer(object.ptr(), &held_.back(),
                           must_write ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      held_.pop_back();
      throw nanobind::python_error();
    }
    return (*this)[held_.size() - 1];
  }
  std::size_t size() const { return held_.size(); }
  std::span<std::byte> operator[](std::size_t i) const {
    return {static_cast<std::byte*>(held_[i].buf), static_cast<std::size_t>(held_[i].len)};
  }

 private:
  std::vector<Py_buffer> held_;
};

}  // namespace kvelastic
