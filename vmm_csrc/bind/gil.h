// Letting go of Python's lock and taking it back, also in a thread that outlives the interpreter.
//
// Up to Python 3.13 a daemon thread that wants the lock while the interpreter ends is ended by
// pthread_exit(). That unwinds the C++ frames below it, and where it meets a destructor or a
// catch-all the process aborts. So here such a thread sleeps for ever instead, as Python 3.14 has
// it; it ends with the process a moment later.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace kvelastic {

[[noreturn]] inline void sleep_until_the_process_ends() {
  for (;;) ::pause();
}

/// While it lives, this thread does not hold the GIL. Made and destroyed by a thread that does.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;
  ~GilReleased() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the forced unwinding of pthread_exit(); to leave this block would abort
      sleep_until_the_process_ends();
    }
  }

 private:
  PyThreadState* state_;
};

/// While it lives, this thread holds the GIL, whether Python knows the thread or not.
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
