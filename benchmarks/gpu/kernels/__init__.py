"""Decode attention in Triton over a paged cache: its price, its answers, and what it may read.

    python -m benchmarks.gpu.kernels.attention        the cost of where blocks lie
    python -m benchmarks.gpu.kernels.decode           tokens while pages come and go
    python -m benchmarks.gpu.kernels.stale_columns    what a kernel meets behind its block table

Exit status: 0 all is right, 1 something is not, 77 it needs a GPU, with the reason on stdout.
"""
