"""The status of an instance and the outcome of a request to it, for all user interfaces."""
