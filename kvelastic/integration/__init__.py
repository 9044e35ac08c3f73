"""Integrations with serving engines, one package per engine.

A package imports its engine and kvelastic, but no other integration. No module outside imports
an engine.
"""
