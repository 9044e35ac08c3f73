// Binds the methods of the class Pool that tiers use.
#pragma once

#include <nanobind/nanobind.h>

#include "pool/pool.h"

namespace kvelastic {

void bind_pool_tiers(nanobind::module_& m, nanobind::class_<Pool>& pool);

}  // namespace kvelastic
