"""Findings about the NVIDIA driver, the GPUs, and related packages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvelastic.device import tested_gpus
from kvelastic.doctor.facts import Facts, Gpu
from kvelastic.doctor.finding import Finding, Outcome, State, check, note, ok, problem
from kvelastic.units import MIB_BYTES, format_size

OLDEST_CUDA: Final = 11030
"""First version with complete virtual memory management, in cuDriverGetVersion's format."""
_OLDEST_DRIVER: Final = "465"
_USE_HOST: Final = "set KVELASTIC_DEVICE=host to use host memory"


@check("gpu.driver")
def _driver(facts: Facts) -> Outcome:
    gpus = facts.gpus
    # If host memory is configured, a missing GPU is no problem.
    bad: State = "note" if facts.config.device == "host" else "problem"
    if gpus.library_error:
        return _no_library(facts, bad)
    if gpus.cuda_version is not None and gpus.cuda_version < OLDEST_CUDA:
        return Outcome(
            bad,
            f"the NVIDIA driver is too old: it supports CUDA {_cuda(gpus.cuda_version)}",
            f"install NVIDIA driver {_OLDEST_DRIVER} or later (CUDA {_cuda(OLDEST_CUDA)}),"
            f" or {_USE_HOST}",
        )
    if gpus.child_end:
        return Outcome(
            bad,
            f"the child process that opens the GPUs {gpus.child_end}",
            "check whether nvidia-smi works, and search dmesg for errors (dmesg | grep -i -e nvrm"
            " -e xid); then restart the driver or the machine",
        )
    if gpus.start_error or gpus.count == 0:
        return _no_gpu(facts, bad)
    return ok(f"{_version(facts)}, {gpus.count} GPU{'s' if gpus.count > 1 else ''}")


def _no_library(facts: Facts, bad: State) -> Outcome:
    gpus = facts.gpus
    if gpus.kernel_module or gpus.has_device_files:
        seen = f" (kernel module {gpus.kernel_module})" if gpus.kernel_module else ""
        return Outcome(
            bad,
            f"this machine has an NVIDIA GPU{seen}, but libcuda.so.1 cannot be opened:"
            f" {gpus.library_error}",
            "in a container, start it with `--gpus all` and"
            " NVIDIA_DRIVER_CAPABILITIES=compute,utility; otherwise install the driver's user"
            " libraries (libcuda1) or add their folder to LD_LIBRARY_PATH",
        )
    if facts.config.device.startswith("cuda"):
        return problem(
            f"KVELASTIC_DEVICE={facts.config.device}, but no NVIDIA driver is installed",
            f"install NVIDIA driver {_OLDEST_DRIVER} or later, or {_USE_HOST}",
        )
    return note(
        "no NVIDIA driver: kvelastic uses host memory",
        "ignore this if the machine has no NVIDIA GPU; otherwise install the driver"
        f" ({_OLDEST_DRIVER} or later)",
    )


def _no_gpu(facts: Facts, bad: State) -> Outcome:
    gpus = facts.gpus
    why = gpus.start_error or "no devices"
    visible = gpus.visible_devices
    if "NO_DEVICE" in why or not gpus.start_error:
        hidden = visible is not None
        is_wanted = facts.config.device.startswith("cuda")
        state: State = bad if is_wanted else "note" if hidden or bad == "note" else "warning"
        seen = f" with CUDA_VISIBLE_DEVICES={visible!r}" if hidden else ""
        return Outcome(
            state,
            f"{_version(facts)}, but no GPU is visible{seen}",
            "set CUDA_VISIBLE_DEVICES to a GPU or unset it; in a container, start it with"
            f" `--gpus all`; or {_USE_HOST}",
        )
    return Outcome(
        bad,
        f"{_version(facts)} does not start: {why}",
        "check whether nvidia-smi works; after a driver update, restart the machine (the driver's"
        " kernel module and libraries must have the same version)",
    )


@check("gpu.vmm")
def _vmm(gpu: Gpu, facts: Facts) -> Outcome:
    name = " ".join(filter(None, (f"cuda:{gpu.ordinal}", gpu.name)))
    if gpu.error:
        chosen = facts.config.device in (f"cuda:{gpu.ordinal}", "cuda", "auto")
        if "virtual memory management" in gpu.error:
            do = (
                "use another GPU (Pascal or later, not under WSL, and not a vGPU without unified"
                f" memory), or {_USE_HOST}"
            )
        elif "too old" in gpu.error or "older than" in gpu.error:
            do = "see gpu.driver"
        elif "OUT_OF_MEMORY" in gpu.error:
            do = "free memory on this GPU (nvidia-smi lists the processes that use it)"
        else:
            do = f"check this GPU with nvidia-smi, or {_USE_HOST}"
        return Outcome(("problem" if chosen else "warning"), f"{name}: {gpu.error}", do)
    seen = (
        f"{name} ({gpu.uuid}): pages of {format_size(gpu.granularity_bytes)},"
        f" {format_size(gpu.free_bytes)} of {format_size(gpu.total_bytes)} free"
    )
    if gpu.granularity_bytes != 2 * MIB_BYTES:
        return note(
            seen,
            "no action needed: pages become multiples of this size, and KVELASTIC_PAGE_SIZE_MB is"
            " their minimum",
        )
    return ok(seen)


@check("gpu.seen")
def _seen(gpu: Gpu, table: Sequence[tested_gpus.Row]) -> Outcome:
    name = f"cuda:{gpu.ordinal} {gpu.name}"
    if tested_gpus.has_run(gpu.name, table):
        return ok(f"{name}: {tested_gpus.experience(gpu.name, table)}")
    rows = "; ".join(f"{row.gpu} ({row.attention}): {row.how}" for row in table)
    return note(
        f"{name}: kvelastic is not tested on this GPU model. Tested: {rows}",
        "compare the engine's output with and without kvelastic, and report the result (see"
        " docs/gpu.md)",
    )


@check("gpu.device")
def _device(facts: Facts) -> Outcome:
    device = facts.config.device
    if device == "auto":
        usable = [gpu for gpu in facts.gpus.gpus if not gpu.error]
        seen = f"cuda:{usable[0].ordinal}" if usable else "host memory"
        return ok(f"KVELASTIC_DEVICE=auto selects {seen}")
    if device == "host":
        return ok("KVELASTIC_DEVICE=host selects host memory")
    ordinal = int(device.partition(":")[2] or 0)
    if any(gpu.ordinal == ordinal and not gpu.error for gpu in facts.gpus.gpus):
        return ok(f"KVELASTIC_DEVICE={device}")
    known = ", ".join(f"cuda:{gpu.ordinal}" for gpu in facts.gpus.gpus if not gpu.error)
    if not known:
        return problem(f"KVELASTIC_DEVICE={device} is not usable, and no other GPU is", _USE_HOST)
    return problem(
        f"KVELASTIC_DEVICE={device} is not usable; usable devices: {known}",
        f"set KVELASTIC_DEVICE to one of these, or {_USE_HOST}",
    )


@check("gpu.packages")
def _packages(facts: Facts) -> Outcome:
    if facts.gpus.library_error:
        return ok("NVML is not needed: there is no NVIDIA driver")
    if facts.gpus.nvml_error:
        return note(
            f"NVML cannot be opened: {facts.gpus.nvml_error}",
            "ignore this for engines; for kvctl devices, set"
            " NVIDIA_DRIVER_CAPABILITIES=compute,utility in a container, otherwise install the"
            " driver's NVML library (libnvidia-ml1)",
        )
    version = facts.packages.version("nvidia-ml-py")
    package = "no Python package" if version is None else f"nvidia-ml-py {version}"
    seen = f"NVML works; {package} is installed"
    if version is None:
        return note(
            seen, "if kvctl devices reports a missing package, run pip install 'kvelastic[cuda]'"
        )
    return ok(seen)


def _version(facts: Facts) -> str:
    gpus = facts.gpus
    cuda = "an unknown CUDA" if gpus.cuda_version is None else f"CUDA {_cuda(gpus.cuda_version)}"
    return " ".join(filter(None, ("NVIDIA driver", gpus.kernel_module, f"({cuda})")))


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _each_gpu(facts: Facts) -> Iterator[Finding]:
    for gpu in facts.gpus.gpus:
        yield from _vmm(gpu, facts)
        if not gpu.error:
            yield from _seen(gpu, facts.gpus_that_ran)


CHECKS: Final = (_driver, _each_gpu, _device, _packages)
