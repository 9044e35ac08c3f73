// `kvelastic._vmm.KvcachedSegment`: the file that an instance keeps for kvcached's programs.
#include "segment/kvcached_segment.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bind/control_block.h"
#include "bind/errors.h"
#include "bind/gil.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvelastic {

void bind_kvcached_segment(nb::module_& m) {
  nb::class_<KvcachedSegment>(m, "KvcachedSegment",
                              "kvcached's segment of one instance; see "
                              "vmm_csrc/segment/kvcached_segment.h.")
      .def_static(
          "create",
          [](const std::string& path, const std::string& own_path,
             const PyControlBlock& control_block) {
            return std::shared_ptr<KvcachedSegment>(
                unwrap(KvcachedSegment::create(path, own_path, control_block.native())));
          },
          "path"_a, "own_path"_a, "control_block"_a,
          "Create the file at `path`, or reuse one that kvcached or a dead instance left behind. "
          "`own_path` and `control_block` are the instance's own segment. Raises "
          "SegmentExistsError if "
          "the name belongs to another kind of file or to another user's file, or SegmentError.")
      .def(
          "start", [](KvcachedSegment& segment) { check(segment.start()); },
          "Start the thread that takes over clients' limits. Call this once the instance handles "
          "requests. Raises SegmentError if inotify cannot watch the file.")
      .def(
          "look", [](KvcachedSegment& segment) { check(segment.look()); },
          "For tests without the thread: synchronize file and instance.")
      .def(
          "close", [](KvcachedSegment& segment) { without_gil([&] { segment.close(); }); },
          "Stop the thread, wait for it, and remove the file. Idempotent; does nothing in a forked "
          "child.");
}

}  // namespace kvelastic
