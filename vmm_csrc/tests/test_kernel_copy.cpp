// Copies by the kernel within this process, by address and through a pipe.
#include <cstring>
#include <vector>

#include "check.h"
#include "memory_pieces_fixture.h"
#include "transfer/kernel_copy.h"

namespace kvelastic {
namespace {

void check_that_all_sizes_are_copied() {
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, std::size_t{70'001}, (std::size_t{3} << 20) + 5}) {
    const auto from = noise(bytes, 1);
    std::vector<std::byte> to(bytes);
    // Of the small ones more than a call takes.
    CHECK(bool(copy_pieces(cut(from, 900, 2), cut(to, 1'700, 3))));
    CHECK(from == to);
  }
}

void check_that_what_is_not_there_is_an_error() {
  const Torn torn;
  std::vector<std::byte> whole(Torn::kBytes, std::byte{7});
  const std::vector<Piece> pieces{{address_of(whole.data()), whole.size()}};
  CHECK(copy_pieces(torn.pieces(), pieces).error().code == Errc::kMapping);
  whole.assign(Torn::kBytes, std::byte{9});
  CHECK(copy_pieces(pieces, torn.pieces()).error().code == Errc::kMapping);
  CHECK(torn.at[0] == std::byte{9});  // in order, so what lies before the hole is there
}

void check_that_a_copy_that_failed_leaves_nothing_to_the_next() {
  const Torn torn;
  std::vector<std::byte> first(Torn::kBytes, std::byte{1}), second(5000, std::byte{2}), to(5000);
  KernelCopy kernel;
  const iovec hole{torn.at, Torn::kBytes};
  CHECK(kernel.scatter(first, {&hole, 1}).error().code == Errc::kMapping);
  const iovec from{second.data(), second.size()};
  CHECK(bool(kernel.gather({&from, 1}, to)));
  CHECK(to == second);
}

TEST(copies_are_complete_for_all_piece_sizes) {
  check_that_all_sizes_are_copied();
}

TEST(copies_of_unmapped_memory_fail) {
  check_that_what_is_not_there_is_an_error();
  check_that_a_copy_that_failed_leaves_nothing_to_the_next();
}

TEST(copies_use_a_pipe_without_process_vm_readv) {
  without_process_vm([] {
    check_that_all_sizes_are_copied();
    check_that_what_is_not_there_is_an_error();
    check_that_a_copy_that_failed_leaves_nothing_to_the_next();
  });
}

TEST(copies_with_different_sizes_are_refused) {
  std::vector<std::byte> memory(100);
  const std::vector<Piece> whole{{address_of(memory.data()), 100}};
  const std::vector<Piece> part{{address_of(memory.data()), 99}};
  const std::vector<Piece> beyond{{~std::uint64_t{0}, 2}};
  CHECK(copy_pieces(whole, part).error().code == Errc::kInvalidArgument);
  CHECK(copy_pieces(beyond, part).error().code == Errc::kInvalidArgument);
  CHECK(copy_pieces(part, beyond).error().code == Errc::kInvalidArgument);
}

}  // namespace
}  // namespace kvelastic
