"""The commands of kvctl."""
