"""The disk store: records in segments of files on a local disk, with an index in memory."""
