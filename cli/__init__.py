"""The command line: kvctl. It speaks to instances only through their segments."""
