"""Memory managers: the size of the KV pool and the slices of passes. One file each, see `MEMORY_MANAGERS`."""
