// `kvelastic._vmm`: lists of pieces, and copies between processes without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "base/memory_pieces.h"
#include "bind/errors.h"
#include "bind/ids.h"
#include "driver/cuda_driver.h"
#include "transfer/held_blocks.h"
#include "transfer/kernel_copy.h"
#include "transfer/piece_lists.h"
#include "transfer/piece_streams.h"
#include "transfer/process_copy.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

std::vector<Piece> pieces_of(const nb::bytes& packed) {
  if (packed.size() % sizeof(Piece) != 0) {
    raise_code("INVALID_ARGUMENT", "a list of pieces that is cut off");
  }
  std::vector<Piece> pieces(packed.size() / sizeof(Piece));
  if (!pieces.empty()) std::memcpy(pieces.data(), packed.data(), packed.size());
  return pieces;
}

nb::bytes packed_of(const std::vector<Piece>& pieces) {
  return nb::bytes(pieces.data(), pieces.size() * sizeof(Piece));
}

std::vector<std::uint64_t> numbers_of(const nb::bytes& packed) {
  std::vector<std::uint64_t> numbers(packed.size() / sizeof(std::uint64_t));
  if (!numbers.empty()) std::memcpy(numbers.data(), packed.data(), numbers.size() * 8);
  return numbers;
}

[[noreturn]] void refuse_pieces() {
  PyErr_Clear();
  raise_code("INVALID_ARGUMENT", "pieces are pairs of an address and a size, both 0 or more");
}

/// Converts an address or a size. Accepts any integer type, such as NumPy's, through __index__.
std::uint64_t number_of(nb::handle item) {
  const nb::object index =
      PyLong_CheckExact(item.ptr()) ? nb::borrow(item) : nb::steal(PyNumber_Index(item.ptr()));
  if (!index.is_valid()) refuse_pieces();
  const std::uint64_t value = PyLong_AsUnsignedLongLong(index.ptr());
  if (value == ~std::uint64_t{0} && PyErr_Occurred() != nullptr) refuse_pieces();
  return value;
}

/// Returns the sequence as a tuple, because Python code could change a list during the call.
nb::object tuple_of(nb::handle sequence) {
  nb::object tuple = nb::steal(PySequence_Tuple(sequence.ptr()));
  if (!tuple.is_valid()) refuse_pieces();
  return tuple;
}

nb::bytes pack_pieces(
    nb::typed<nb::handle, std::vector<std::pair<std::uint64_t, std::uint64_t>>> sequence) {
  const nb::object all = tuple_of(sequence);
  const Py_ssize_t count = PyTuple_Size(all.ptr());
  std::vector<Piece> pieces;
  pieces.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const nb::object pair = tuple_of(NB_TUPLE_GET_ITEM(all.ptr(), i));
    if (PyTuple_Size(pair.ptr()) != 2) refuse_pieces();
    const std::uint64_t address = number_of(NB_TUPLE_GET_ITEM(pair.ptr(), 0));
    pieces.push_back({address, number_of(NB_TUPLE_GET_ITEM(pair.ptr(), 1))});
  }
  return packed_of(pieces);
}

std::uint64_t bytes_of_packed(const nb::bytes& packed) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 63;
  const std::vector<Piece> pieces = pieces_of(packed);
  for (const Piece& piece : pieces) {
    if (piece.address >= kMost || piece.bytes >= kMost) {
      raise_code("INVALID_ARGUMENT", "an address or a size that no memory has");
    }
  }
  return unwrap(bytes_of(pieces));
}

std::vector<std::tuple<nb::bytes, nb::bytes, std::uint64_t>> portions(const nb::bytes& from,
                                                                      const nb::bytes& to,
                                                                      std::size_t most_pieces,
                                                                      std::uint64_t most_bytes) {
  std::vector<std::tuple<nb::bytes, nb::bytes, std::uint64_t>> out;
  for (const Portion& each :
       unwrap(portions_of(pieces_of(from), pieces_of(to), most_pieces, most_bytes))) {
    out.emplace_back(packed_of(each.from), packed_of(each.to), each.bytes);
  }
  return out;
}

std::vector<std::pair<std::size_t, nb::bytes>> by_range(const nb::bytes& packed,
                                                        const nb::bytes& starts,
                                                        const nb::bytes& ends) {
  std::vector<std::pair<std::size_t, nb::bytes>> out;
  const std::vector<PiecesInRange> found =
      unwrap(pieces_by_range(pieces_of(packed), numbers_of(starts), numbers_of(ends)));
  for (const PiecesInRange& each : found) {
    out.emplace_back(each.range, found.size() == 1 ? packed : packed_of(each.pieces));
  }
  return out;
}

PieceDeadline deadline_in(double timeout_s) {
  constexpr double kLongest = 86400.0 * 365;
  const double bounded = std::isnan(timeout_s) ? 0 : std::min(std::max(timeout_s, 0.0), kLongest);
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                                std::chrono::duration<double>(bounded));
}

}  // namespace

void bind_transfer(nb::module_& m) {
  m.def("pack_pieces", &pack_pieces, "pieces"_a,
        "Encode (address, size) pairs as messages carry them: two little-endian 64-bit integers "
        "each. The result is called packed pieces.");
  m.def(
      "bytes_of_pieces", &bytes_of_packed, "pieces"_a,
      "Return the total size of packed pieces in bytes. Raises InvalidArgumentError on overflow.");
  m.def("portions_of_pieces", &portions, "sources"_a, "targets"_a, "most_pieces"_a, "most_bytes"_a,
        "Split copies into portions of at most `most_pieces` on each side and `most_bytes`. "
        "Returns (packed sources, packed targets, bytes) of each.");
  m.def("pieces_by_range", &by_range, "pieces"_a, "starts"_a, "ends"_a,
        "Group packed pieces by the range that contains them. Returns (range number, packed "
        "pieces) pairs. Every piece must lie entirely in one range.");

  nb::class_<HeldBlocks>(m, "HeldBlocks",
                         "Pins blocks of a pool while others copy from or to them, until "
                         "release(). Any thread, one at a time.")
      .def_static(
          "hold",
          [](std::shared_ptr<Range> memory, std::shared_ptr<Pool> pool, const nb::bytes& packed) {
            const std::vector<Piece> pieces = pieces_of(packed);
            in_owner(*memory);
            in_owner(*pool);
            return unwrap(without_gil([&] { return HeldBlocks::hold(memory, pool, pieces); }));
          },
          "memory"_a, "pool"_a, "pieces"_a,
          "Pin the blocks that packed pieces belong to. `memory` must be the pool's range.")
      .def(
          "is_whole",
          [](const HeldBlocks& held) { return without_gil([&] { return held.is_whole(); }); },
          "Return True if every page has been mapped all the time since hold().")
      .def(
          "release", [](HeldBlocks& held) { without_gil([&] { held.release(); }); },
          "End the pin. Idempotent; may block.");
  m.def(
      "blocks_in",
      [](const Geometry& geometry, std::uint64_t base, const nb::bytes& packed) {
        return list_of(unwrap(blocks_in(geometry, base, pieces_of(packed))));
      },
      "geometry"_a, "base"_a, "pieces"_a,
      "Return the ids of the blocks that packed pieces belong to. `base` is the range's first "
      "address.");

  m.def(
      "read_from_process",
      [](int pid, const nb::bytes& theirs, const nb::bytes& ours, double timeout_s) {
        const std::vector<Piece> from = pieces_of(theirs), to = pieces_of(ours);
        const PieceDeadline deadline = deadline_in(timeout_s);
        check(without_gil([&] { return read_from_process(pid, from, to, deadline); }));
      },
      "pid"_a, "theirs"_a, "ours"_a, "timeout_s"_a,
      "Copy pieces of another process to pieces of this one; see vmm_csrc/transfer/process_copy.h. "
      "Blocks, without the GIL.");
  m.def(
      "copy_pieces",
      [](const nb::bytes& sources, const nb::bytes& targets) {
        const std::vector<Piece> from = pieces_of(sources), to = pieces_of(targets);
        check(without_gil([&] { return copy_pieces(from, to); }));
      },
      "sources"_a, "targets"_a,
      "Copy pieces within this process. Raises an error if memory is not mapped. Blocks, without "
      "the GIL.");
  m.def(
      "copy_pieces_on_gpu",
      [](CudaDriver& driver, const nb::bytes& sources, const nb::bytes& targets) {
        const std::vector<Piece> from = pieces_of(sources), to = pieces_of(targets);
        check(without_gil([&] { return driver.copy_pieces(from, to); }));
      },
      "driver"_a, "sources"_a, "targets"_a,
      "Copy each piece to a target of the same size, in memory of GPUs or of the host. Blocks, "
      "without the GIL.");
  m.def(
      "send_pieces",
      [](int fd, const nb::bytes& packed, double timeout_s) {
        const std::vector<Piece> pieces = pieces_of(packed);
        const PieceDeadline deadline = deadline_in(timeout_s);
        return unwrap(without_gil([&] { return send_pieces(fd, pieces, deadline); }));
      },
      "fd"_a, "pieces"_a, "timeout_s"_a,
      "Send pieces over a socket; returns their checksum. Blocks, without the GIL.");
  m.def(
      "receive_pieces",
      [](int fd, const nb::bytes& packed, double timeout_s) {
        const std::vector<Piece> pieces = pieces_of(packed);
        const PieceDeadline deadline = deadline_in(timeout_s);
        return unwrap(without_gil([&] { return receive_pieces(fd, pieces, deadline); }));
      },
      "fd"_a, "pieces"_a, "timeout_s"_a,
      "Receive exactly these pieces; returns their checksum. Blocks, without the GIL.");
}

}  // namespace kvelastic
