"""The steps, in order of their value: what each proves, what it needs, how long it may take.

A step is a program (see findings.py). What needs "gpu" cannot run on the simulated driver.
"""

from __future__ import annotations

from dataclasses import dataclass

OWN = "benchmarks.gpu.steps"
TORCH = ("gpu", "torch for CUDA")
KERNELS = (*TORCH, "triton", "the kernels")
BATCHING = (*TORCH, "transformers", "the integration")
VLLM = (*TORCH, "triton", "vllm")


@dataclass(frozen=True)
class Step:
    """One row of the list."""

    name: str
    proves: str
    limit_s: int
    usual_s: int
    """What it takes where nothing is wrong: it is not begun with less time left.

    No less than a machine with an H100 and 16 cores took (`results/`)."""
    command: tuple[str, ...]
    """The module, and its arguments."""
    needs: tuple[str, ...] = ()

    @property
    def needs_gpu(self) -> bool:
        return "gpu" in self.needs


def _vmm(part: str, proves: str, limit_s: int, usual_s: int, *needs: str) -> Step:
    return Step(f"vmm-{part}", proves, limit_s, usual_s, (f"{OWN}.vmm", part), needs)


def _decode(how: str, proves: str, limit_s: int, usual_s: int, *more: str) -> Step:
    command = (f"{OWN}.kernels", "decode", *more)
    return Step(f"decode-{how}", proves, limit_s, usual_s, command, KERNELS)


def _vllm_alone(how: str, proves: str, dtype: str) -> Step:
    command = (f"{OWN}.vllm_alone", "--dtype", dtype)
    return Step(f"vllm-{how}", proves, 300, 135, command, VLLM)


BUILD = Step(
    "build",
    "the native module compiles and loads; nothing is installed",
    420,
    20,
    (f"{OWN}.build",),
)
STEPS = (
    BUILD,
    Step("facts", "granularity, attributes, memory, what a page costs", 60, 10, (f"{OWN}.facts",)),
    Step("prices", "what a page's price depends on", 60, 5, (f"{OWN}.prices",)),
    Step(
        "stream-wait",
        "an unmap waits for the kernels of the stream that was named",
        60,
        15,
        (f"{OWN}.stream_wait",),
    ),
    Step(
        "default-stream",
        "an unmap waits for the kernels of the legacy default stream",
        60,
        10,
        (f"{OWN}.default_stream",),
    ),
    Step(
        "capture",
        "a capture of a CUDA graph goes on beside every call of kvelastic's",
        60,
        5,
        (f"{OWN}.capture",),
    ),
    Step(
        "ring",
        "vLLM's way: a scheduler without a device, a worker that maps beside its kernels",
        90,
        15,
        (f"{OWN}.ring",),
    ),
    Step("battery", "the contract of drivers", 180, 15, (f"{OWN}.battery",)),
    Step(
        "random-operations",
        "random operations of range and pool lose no byte",
        120,
        10,
        (f"{OWN}.random_operations",),
    ),
    Step("datadist", "caches' memory comes back, and copies are whole", 60, 5, (f"{OWN}.caches",)),
    Step(
        "copies",
        "copies to and from the host in GB/s; a move per block",
        90,
        5,
        (f"{OWN}.copies",),
    ),
    Step(
        "fresh-contents",
        "what a new page holds: zeros, or what another process wrote",
        60,
        10,
        (f"{OWN}.fresh_contents",),
    ),
    Step("free-memory", "released memory is free, and how soon", 60, 5, (f"{OWN}.free_memory",)),
    Step("limit", "a limit is acknowledged within 5 ms, and holds", 90, 5, (f"{OWN}.limit",)),
    Step("killed", "kill -9 of one instance gives everything back", 60, 5, (f"{OWN}.killed",)),
    Step(
        "killed-tight",
        "kill -9 with a full device, and with pinned staging: how soon all of it is back",
        180,
        12,
        (f"{OWN}.killed_tight",),
    ),
    Step(
        "handover",
        "10 GiB of an idle model's cache go to a busy one: first page, and all",
        120,
        10,
        (f"{OWN}.handover",),
    ),
    _decode(
        "graphs",
        "tokens equal to a dense cache's under map and unmap, CUDA graphs",
        150,
        50,
        "--graphs",
    ),
    Step(
        "transformers",
        "continuous batching on an elastic cache gives the tokens of stock",
        240,
        50,
        (f"{OWN}.transformers_batching",),
        BATCHING,
    ),
    _vllm_alone("graphs", "vLLM alone, CUDA graphs: stock, kvelastic, stock again", "bfloat16"),
    Step(
        "pair",
        "two vLLM servers on one budget: first tokens as a lone server's, and its tokens",
        420,
        270,
        (f"{OWN}.pair",),
        VLLM,
    ),
    Step(
        "launches",
        "what launches wait while pages come and go",
        90,
        10,
        (f"{OWN}.launches",),
        TORCH,
    ),
    _vmm("call_costs", "what each call costs at 2 to 256 MiB a page", 120, 5),
    _vmm("page_cycle", "a page's cycle is within 1.2 of the bare calls; recycled or cold", 90, 5),
    _vmm("grow_shrink", "8 GiB grown and shrunk, beside the calls that kvcached makes", 150, 15),
    _vmm("beside_kernel", "pages come and go beside a running kernel", 120, 20, *TORCH),
    _vmm("two_processes", "whether the driver serves two processes side by side", 90, 10),
    Step(
        "not-ready",
        "what calls answer, and how long they take, beside kernels",
        60,
        5,
        (f"{OWN}.not_ready",),
        TORCH,
    ),
    Step(
        "triton-pointer",
        "Triton takes a tensor whose base is not mapped",
        90,
        10,
        (f"{OWN}.triton_pointer",),
        (*TORCH, "triton"),
    ),
    Step(
        "device-names",
        "each device, each MIG instance too, has the name that nvidia-smi gives it",
        60,
        5,
        (f"{OWN}.device_names",),
    ),
    Step("exchange", "pages go to another process, contents and all", 60, 5, (f"{OWN}.exchange",)),
    Step(
        "attention",
        "what the layouts cost paged attention, ids up to 60 GiB: the default page",
        280,
        35,
        (f"{OWN}.kernels", "attention"),
        KERNELS,
    ),
    Step(
        "kvcached",
        "kvcached beside kvelastic: the same calls, and what is held",
        240,
        120,
        (f"{OWN}.kvcached",),
        (*TORCH, "kvcached"),
    ),
    _vllm_alone("float32", "vLLM alone, eager: stock, kvelastic, stock again", "float32"),
    Step(
        "tokens",
        "transformers, tokens a second: stock, kvelastic, by turns",
        120,
        65,
        (f"{OWN}.tokens",),
        BATCHING,
    ),
    Step(
        "colocation",
        "two transformers engines and one budget: bursts in turn, beside halves and a lone one",
        180,
        110,
        (f"{OWN}.colocation",),
        BATCHING,
    ),
    _decode("eager", "the same tokens without CUDA graphs", 150, 90),
    # Last: these provoke illegal accesses and lost captures, which may leave a GPU in a bad state.
    Step(
        "capture-bare",
        "which bare calls end a capture, and which of them RELAXED permits",
        60,
        5,
        (f"{OWN}.capture_bare",),
    ),
    Step(
        "unnamed-stream",
        "why it must be named: the default stream does not order the others",
        60,
        10,
        (f"{OWN}.unnamed_stream",),
    ),
    Step(
        "stale-columns",
        "H3: a kernel that reads behind a row's end faults; a guard page keeps it from harm",
        120,
        20,
        (f"{OWN}.kernels", "stale_columns"),
        KERNELS,
    ),
    _decode(
        "control",
        "a page that is unmapped too early would be noticed",
        90,
        10,
        "--control",
        "no-fences",
    ),
    Step(
        "stale-columns-checked",
        "the same as stale-columns under compute-sanitizer: what reads no further is clean",
        200,
        90,
        (f"{OWN}.kernels", "stale_columns", "--sanitizer"),
        (*KERNELS, "compute-sanitizer"),
    ),
)
NAMES = tuple(step.name for step in STEPS)
