"""Hugging Face transformers: loaded by `kvelastic.startup`, its continuous batching not hooked yet.

Importing this package imports nothing of the above.
"""
