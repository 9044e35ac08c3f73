// What a native test needs, and no more: TEST(name) { CHECK(...); }   main.cpp runs them all.
#pragma once

#include <cstdio>
#include <string_view>
#include <vector>

namespace kvelastic::test {

struct Case {
  const char* name;
  void (*body)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

struct Registered {
  Registered(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

inline bool check(bool holds, const char* what, const char* file, int line) {
  if (!holds) {
    constexpr int enough = 50;  // a check in a loop may fail a million times
    if (++failures() > enough) return holds;
    std::fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, what);
  }
  return holds;
}

}  // namespace kvelastic::test

#define TEST(name)                                                      \
  static void name();                                                   \
  static const ::kvelastic::test::Registered name##_case(#name, &name); \
  static void name()

/// Says so and goes on if the condition is false.
#define CHECK(...) ::kvelastic::test::check(bool(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)

/// Says so and ends this test if the condition is false.
#define REQUIRE(...)                                                                            \
  do {                                                                                          \
    if (!::kvelastic::test::check(bool(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)) return; \
  } while (false)
