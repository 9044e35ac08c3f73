// Releases and takes the GIL, also in threads that outlive the interpreter.
//
// Up to Python 3.13, a daemon thread that takes the GIL during finalization is ended by
// pthread_exit(). That unwinds the C++ frames of the thread, and the process aborts at the first
// destructor or catch-all. Here such a thread sleeps instead, as in Python 3.14, until the process
// ends a moment later.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace kvelastic {

[[noreturn]] inline void sleep_until_the_process_ends() {
  for (;;) ::pause();
}

/// Releases the GIL until it is destroyed. Pre: the thread holds the GIL, and also destroys this.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the forced unwinding of pthread_exit(); leaving this block would abort
      sleep_until_the_process_ends();
    }
  }

 private:
  PyThreadState* state_;
};

/// Holds the GIL until it is destroyed, also in a thread that Python did not create.
class GilHeld {
 public:
  GilHeld() {
    try {
      state_ = PyGILState_Ensure();
    } catch (...) {
      sleep_until_the_process_ends();
    }
  }
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;
  ~GilHeld() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_{};
};

}  // namespace kvelastic
