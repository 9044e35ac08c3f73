"""Engines on FlexKV's interface: their configuration turned into FlexKV's, and their connectors."""
