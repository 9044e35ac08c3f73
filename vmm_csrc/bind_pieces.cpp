// `kvelastic._vmm`: copies of pieces between processes, without the GIL.
#include <nanobind/nanobind.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "bind_errors.h"
#include "piece_streams.h"
#include "pieces.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {
namespace {

std::vector<Piece> pieces_of(const nb::bytes& packed) {
  if (packed.size() % sizeof(Piece) != 0) {
    raise_code("INVALID_ARGUMENT", "pieces are pairs of 64-bit numbers: address, bytes");
  }
  std::vector<Piece> pieces(packed.size() / sizeof(Piece));
  if (!pieces.empty()) std::memcpy(pieces.data(), packed.data(), packed.size());
  return pieces;
}

PieceDeadline deadline_in(double timeout_s) {
  constexpr double kLongest = 86400.0 * 365;
  const double bounded = std::isnan(timeout_s) ? 0 : std::min(std::max(timeout_s, 0.0), kLongest);
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                                std::chrono::duration<double>(bounded));
}

}  // namespace

void bind_pieces(nb::module_& m) {
  m.def(
      "read_from_process",
      [](int pid, const nb::bytes& theirs, const nb::bytes& ours, double timeout_s) {
        const std::vector<Piece> from = pieces_of(theirs), to = pieces_of(ours);
        const PieceDeadline deadline = deadline_in(timeout_s);
        check(without_gil([&] { return read_from_process(pid, from, to, deadline); }));
      },
      "pid"_a, "theirs"_a, "ours"_a, "timeout_s"_a,
      "Copy another process's pieces here; see vmm_csrc/pieces.h. Blocks, without the GIL.");
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
