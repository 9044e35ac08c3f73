"""Serving engines that kvelastic runs in, one package each; they know the engine and kvelastic.

No package here knows another one, and nothing outside imports an engine.
"""
