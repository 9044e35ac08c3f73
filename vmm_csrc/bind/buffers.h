// Buffers of Python objects that a native call works on.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>
#include <vector>

namespace kvelastic {

/// Buffers that stay until this goes: memory does not move and is not freed meanwhile. Made, filled
/// and dropped with the GIL held; what is in them may be used without it.
class Buffers {
 public:
  Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() {
    for (Py_buffer& held : held_) PyBuffer_Release(&held);
  }

  /// Raises what the object raises: BufferError where it is not contiguous or is read-only.
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
