"""The controller's own routes."""
