// CUDA_VISIBLE_DEVICES: which devices of the machine this process sees, and in which order.
#pragma once

#include "cuda_abi.h"

namespace kvsim {

/// How many devices the process sees. Pre, here and below: cuInit has succeeded.
int visible_devices();

bool is_device(CUdevice device);

/// The machine's device behind one that the process sees.
int physical_device(CUdevice device);

/// The other way; -1 for a device that the process does not see.
CUdevice visible_device(int physical);

}  // namespace kvsim
