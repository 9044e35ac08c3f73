"""The folder store: a file for each record, shared by engines and machines."""
