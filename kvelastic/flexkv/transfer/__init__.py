"""Moving blocks between devices."""
