"""Engines that the controller starts."""
