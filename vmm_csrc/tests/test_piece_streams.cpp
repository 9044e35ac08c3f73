// Pieces over sockets: whole and in order whatever their sizes, an error where memory or the peer
// goes, and the same where the system lets nobody use process_vm_readv.
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "memory_pieces_fixture.h"
#include "transfer/piece_streams.h"

namespace kvelastic {
namespace {

/// Two ends of a stream.
struct Stream {
  Stream() { CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    close(0);
    close(1);
  }
  void close(int end) {
    if (ends[end] >= 0) ::close(std::exchange(ends[end], -1));
  }
  int ends[2] = {-1, -1};
};

/// Pieces that are not neighbours: each lies before the one that it follows.
std::vector<Piece> backwards(const std::vector<std::byte>& memory, std::size_t bytes) {
  std::vector<Piece> pieces;
  for (std::size_t end = memory.size(); end > 0; end -= std::min(bytes, end)) {
    const std::size_t size = std::min(bytes, end);
    pieces.push_back({address_of(memory.data() + end - size), size});
  }
  return pieces;
}

/// What both sides answer, the sender in a thread of its own.
std::pair<Result<std::uint64_t>, Result<std::uint64_t>> travel(const std::vector<Piece>& from,
                                                               const std::vector<Piece>& to) {
  Stream stream;
  Result<std::uint64_t> sent = Error{Errc::kIntegrity, "not sent"};
  std::thread sender([&] {
    sent = send_pieces(stream.ends[0], from, soon());
    stream.close(0);
  });
  Result<std::uint64_t> received = receive_pieces(stream.ends[1], to, soon());
  stream.close(1);
  sender.join();
  return {std::move(sent), std::move(received)};
}

void check_that_all_sizes_travel() {
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{1}, (std::size_t{256} << 10) - 1, std::size_t{256} << 10,
        (std::size_t{256} << 10) + 1, (std::size_t{3} << 20) + 5}) {
    const auto theirs = noise(bytes, 4);
    std::vector<std::byte> ours(bytes);
    const auto [sent, received] = travel(cut(theirs, 300'000, 5), cut(ours, 200'000, 6));
    CHECK(sent && received && *sent == *received);
    CHECK(ours == theirs);
  }
}

void check_that_holes_are_errors() {
  const Torn torn;
  std::vector<std::byte> whole(Torn::kBytes);
  const std::vector<Piece> pieces{{address_of(whole.data()), whole.size()}};
  {
    const auto [sent, received] = travel(torn.pieces(), pieces);
    CHECK(!sent && sent.error().code == Errc::kMapping);
    CHECK(!received && received.error().code == Errc::kChannelClosed);
  }
  const auto [sent, received] = travel(pieces, torn.pieces());
  CHECK(!received && received.error().code == Errc::kMapping);
}

TEST(stream_transfers_pieces_of_all_sizes) {
  check_that_all_sizes_travel();
}

TEST(stream_transfers_pieces_without_process_vm_readv) {
  without_process_vm([] {
    check_that_all_sizes_travel();
    check_that_holes_are_errors();
  });
}

TEST(stream_checksum_is_independent_of_piece_count) {
  const auto theirs = noise(600'001, 9);
  std::vector<std::byte> ours(theirs.size());
  std::vector<std::byte> mirrored(theirs.size());
  const std::vector<Piece> one{{address_of(theirs.data()), theirs.size()}};
  const auto [sent, received] = travel(one, backwards(ours, 7));
  CHECK(sent && received && *sent == *received);
  const auto [again, straight] = travel(backwards(ours, 7), cut(mirrored, 100'000, 1));
  CHECK(again && straight && *again == *straight && *again == *sent);
  CHECK(mirrored == theirs);
}

TEST(stream_ends_on_unmapped_pieces) {
  check_that_holes_are_errors();
}

TEST(stream_receives_pieces_sent_in_parts) {
  const auto theirs = noise(700'000, 2);
  std::vector<std::byte> ours(theirs.size()), others(theirs.size());
  Stream stream;
  std::thread sender([&] {
    for (std::size_t at = 0, step = 1; at < theirs.size(); at += step, step = step * 3 % 70'001) {
      step = std::min(step, theirs.size() - at);
      CHECK(::send(stream.ends[0], theirs.data() + at, step, 0) == static_cast<ssize_t>(step));
    }
    // Of the next message: it is not this copy's.
    CHECK(::send(stream.ends[0], "!", 1, 0) == 1);
  });
  const auto received = receive_pieces(stream.ends[1], cut(ours, 90'000, 3), soon());
  sender.join();
  CHECK(ours == theirs);
  char next = 0;
  CHECK(::recv(stream.ends[1], &next, 1, 0) == 1 && next == '!');
  const auto [sent, same] = travel(cut(theirs, 90'000, 4), cut(others, 90'000, 5));
  CHECK(received && sent && *received == *sent);
}

TEST(stream_closed_by_peer_is_an_error) {
  std::vector<std::byte> ours(500'000);
  const std::vector<Piece> to{{address_of(ours.data()), ours.size()}};
  for (const std::size_t before : {std::size_t{0}, std::size_t{1}, std::size_t{400'000}}) {
    Stream stream;
    const std::vector<std::byte> part(before);
    std::thread sender([&] {
      for (std::size_t at = 0; at < before;) {
        at += static_cast<std::size_t>(::send(stream.ends[0], part.data(), before - at, 0));
      }
      stream.close(0);
    });
    const auto received = receive_pieces(stream.ends[1], to, soon());
    CHECK(!received && received.error().code == Errc::kChannelClosed);
    sender.join();
  }
  Stream stream;
  stream.close(1);
  const auto sent = send_pieces(stream.ends[0], to, soon());
  CHECK(!sent && sent.error().code == Errc::kChannelClosed);
}

TEST(stream_to_a_stalled_peer_times_out) {
  std::vector<std::byte> ours(std::size_t{8} << 20);  // more than sockets take
  const std::vector<Piece> pieces{{address_of(ours.data()), ours.size()}};
  const auto at_once = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  const Stream stream;
  const auto received = receive_pieces(stream.ends[0], pieces, at_once);
  CHECK(!received && received.error().code == Errc::kChannelTimeout);
  const auto sent = send_pieces(stream.ends[0], pieces, at_once + std::chrono::milliseconds(20));
  CHECK(!sent && sent.error().code == Errc::kChannelTimeout);
}

TEST(stream_refuses_pieces_beyond_the_address_space) {
  const std::vector<Piece> beyond{{~std::uint64_t{0}, 2}};
  const Stream stream;
  CHECK(send_pieces(stream.ends[0], beyond, soon()).error().code == Errc::kInvalidArgument);
  CHECK(receive_pieces(stream.ends[0], beyond, soon()).error().code == Errc::kInvalidArgument);
}

TEST(stream_checksum_matches_the_protocol_version) {
  // Where this changes, the version in kvelastic/transfer/wire.py does, too.
  std::vector<std::byte> memory(600'000);
  for (std::size_t at = 0; at < memory.size(); ++at) memory[at] = static_cast<std::byte>(at % 251);
  std::vector<std::byte> ours(memory.size());
  const auto [sent, received] = travel(cut(memory, 90'000, 1), cut(ours, 90'000, 2));
  CHECK(sent && received && *sent == *received && *sent == 0x343E2D041448AA98u);
}

}  // namespace
}  // namespace kvelastic
