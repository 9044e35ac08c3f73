// The native module, `kvelastic._vmm`.
#include <nanobind/nanobind.h>

#include "base/debug_log.h"

namespace kvelastic {
void bind_copy(nanobind::module_& m);
void bind_driver(nanobind::module_& m);
void bind_engine_blocks(nanobind::module_& m);
void bind_kvcached_segment(nanobind::module_& m);
void bind_ledger(nanobind::module_& m);
void bind_liveness(nanobind::module_& m);
void bind_device_set(nanobind::module_& m);
void bind_pool(nanobind::module_& m);
void bind_reclaim(nanobind::module_& m);
void bind_control_block(nanobind::module_& m);
void bind_record_io(nanobind::module_& m);
void bind_transfer(nanobind::module_& m);
void bind_staging(nanobind::module_& m);
void bind_tier_index(nanobind::module_& m);
}  // namespace kvelastic

NB_MODULE(_vmm, m) {
  m.doc() =
      "kvelastic's memory: drivers, ranges, pools and the shared control block. Does not use "
      "torch.";
  // An engine's tensors keep the range until the interpreter has ended. That is not a leak.
  nanobind::set_leak_warnings(false);
  m.def("set_log_level", &kvelastic::set_log_level, nanobind::arg("level"),
        "Set the lowest level, in the numbers of `logging`, of the lines that native threads write "
        "to stderr.");
  kvelastic::bind_control_block(m);
  kvelastic::bind_kvcached_segment(m);
  kvelastic::bind_record_io(m);
  kvelastic::bind_driver(m);
  kvelastic::bind_copy(m);
  kvelastic::bind_ledger(m);
  kvelastic::bind_liveness(m);
  kvelastic::bind_device_set(m);
  kvelastic::bind_transfer(m);
  kvelastic::bind_staging(m);
  kvelastic::bind_engine_blocks(m);
  kvelastic::bind_tier_index(m);
  kvelastic::bind_pool(m);
  kvelastic::bind_reclaim(m);
}
