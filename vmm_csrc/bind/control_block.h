// The Python class `ControlBlock` for other bindings: a ControlBlockOwner that keeps its memory
// alive.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <memory>
#include <optional>
#include <span>

#include "segment/control_block.h"

namespace kvelastic {

/// Keeps a Python buffer valid, its exporter alive and its mmap open until this is destroyed.
class BufferHold {
 public:
  explicit BufferHold(Py_buffer buffer) : buffer_(buffer) {}
  BufferHold(const BufferHold&) = delete;
  BufferHold& operator=(const BufferHold&) = delete;
  ~BufferHold();  ///< takes the GIL; any thread

  bool readonly() const { return buffer_.readonly != 0; }
  std::span<std::byte> bytes() const {
    return {static_cast<std::byte*>(buffer_.buf), static_cast<std::size_t>(buffer_.len)};
  }

 private:
  Py_buffer buffer_;
};

/// Holds a buffer: a writable one if it can be, and `must_write` refuses any other.
std::shared_ptr<BufferHold> take_buffer(nanobind::handle buffer, bool must_write);

/// Decodes text that any process may have written. Invalid UTF-8 becomes U+FFFD.
nanobind::str text(std::span<const char> field);

/// Converts an id. Raises InvalidArgumentError for another number of bytes.
std::array<std::uint8_t, 16> sixteen(const nanobind::bytes& value, const char* what);

/// `kvelastic._vmm.ControlBlock`.
class PyControlBlock {
 public:
  PyControlBlock(std::shared_ptr<BufferHold> hold, ControlBlockView view,
                 std::unique_ptr<ControlBlockOwner> owner)
      : hold_(std::move(hold)), view_(view), owner_(std::move(owner)) {}

  /// Returns the owner's end, for a pool or a maintenance thread. The pointer keeps the bytes
  /// mapped, even after Python's release(). Throws nanobind::python_error if this is not the owner
  /// or is released.
  std::shared_ptr<ControlBlockOwner> native() const;
  /// A call without the GIL must hold this until it returns. Throws nanobind::python_error if
  /// released.
  std::shared_ptr<BufferHold> hold() const;
  const ControlBlockView& view() const;
  RequestWriter writer() const;

  bool is_owner() const { return owner_ != nullptr; }
  bool is_released() const { return hold_ == nullptr; }
  void release() {
    owner_.reset();
    hold_.reset();
  }

 private:
  std::shared_ptr<BufferHold> hold_;
  ControlBlockView view_;
  std::shared_ptr<ControlBlockOwner> owner_;
};

}  // namespace kvelastic
