"""Memory managers: how much of the device becomes KV pages. One file each, found by `MEMORY_MANAGERS`."""
