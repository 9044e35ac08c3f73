// Memory with contents and with holes, ways to cut it into pieces, and a system that refuses copies
// by address; shared by the tests of copies.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "base/memory_pieces.h"
#include "check.h"

namespace kvelastic {

inline PieceDeadline soon() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(60);
}

inline std::uint64_t address_of(const std::byte* byte) {
  return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(byte));
}

inline std::vector<std::byte> noise(std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> made(bytes);
  for (std::byte& one : made) one = static_cast<std::byte>(random());
  return made;
}

/// The memory in pieces of any size, some of them empty, in order.
inline std::vector<Piece> cut(const std::vector<std::byte>& memory, std::size_t most,
                              unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Piece> pieces;
  for (std::size_t at = 0; at < memory.size();) {
    const std::size_t bytes = std::min<std::size_t>(random() % most, memory.size() - at);
    pieces.push_back({address_of(memory.data() + at), bytes});
    at += bytes;
  }
  return pieces;
}

/// System pages of which one in the middle is not there.
struct Torn {
  Torn() {
    at = static_cast<std::byte*>(
        ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(::mprotect(at + kHole, kSystemPage, PROT_NONE) == 0);
  }
  Torn(const Torn&) = delete;
  Torn& operator=(const Torn&) = delete;
  ~Torn() { ::munmap(at, kBytes); }
  std::vector<Piece> pieces() const { return {{address_of(at), kBytes}}; }
  static constexpr std::size_t kSystemPage = 4096;
  static constexpr std::size_t kBytes = 64 * kSystemPage;
  static constexpr std::size_t kHole = 40 * kSystemPage;
  std::byte* at;
};

/// Runs in a thread in which the system refuses copies by address.
inline void without_process_vm(const std::function<void()>& body) {
  std::thread([&] {
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
    };
    const sock_fprog program{4, filter};
    REQUIRE(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    REQUIRE(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    char byte = 0;
    const iovec vector{&byte, 1};
    REQUIRE(::process_vm_readv(::getpid(), &vector, 1, &vector, 1, 0) == -1 && errno == EPERM);
    body();
  }).join();
}

}  // namespace kvelastic
