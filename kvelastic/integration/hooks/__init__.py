"""Wraps functions of an engine: when (`late_import`), which (`table`), and after checks (`probe`).

This package knows no engine. The hooks of an engine are in its folder of `kvelastic.integration`,
which this package does not import.
"""
