"""Staggered bursts of two models: the published schedule, scaled to the machine."""
