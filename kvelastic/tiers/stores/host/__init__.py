"""The host store: records in an elastic pool of host memory."""
