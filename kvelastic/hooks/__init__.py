"""Wrapping functions of an engine: when (`late_import`), which (`table`), if they fit (`probe`).

Knows no engine; what is hooked into one lies in its folder of `kvelastic.integration`. Importing
this package imports none of them.
"""
