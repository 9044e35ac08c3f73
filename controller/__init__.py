"""The HTTP front over several instances; installed as `kvelastic.controller`.

Not written yet: the package holds its place in the installation.
"""
