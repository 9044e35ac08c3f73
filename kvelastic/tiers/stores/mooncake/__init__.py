"""The Mooncake store: records on servers of Mooncake's store."""
