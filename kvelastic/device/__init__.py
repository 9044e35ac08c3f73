"""The memory that exists: GPUs, the host, page sizes."""
