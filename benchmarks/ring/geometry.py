"""What both ends say of the memory: pages of 2 MiB, one block each."""

from __future__ import annotations

from kvelastic.pool.layout import PageLayout

PAGE_BYTES = 2 << 20
PAGES = 4
LAYOUT = PageLayout(PAGE_BYTES, 1, 1, PAGE_BYTES)
