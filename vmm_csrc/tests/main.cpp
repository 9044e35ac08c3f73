// Runs every TEST, or the one that the first argument names; status 1 if one fails or none has run.
#include <cstdio>
#include <string_view>

#include "check.h"

int main(int argc, char** argv) {
  using kvelastic::test::failures;
  const std::string_view wanted = argc > 1 ? argv[1] : "";
  int ran = 0;
  for (const auto& [name, body] : kvelastic::test::cases()) {
    if (!wanted.empty() && name != wanted) continue;
    const int before = failures();
    body();
    ++ran;
    std::printf("%s %s\n", failures() == before ? "ok  " : "FAIL", name);
    std::fflush(stdout);
  }
  std::printf("%d tests, %d checks failed\n", ran, failures());
  return failures() == 0 && ran > 0 ? 0 : 1;
}
