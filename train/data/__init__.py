"""Data sources, one file each, found by name in the registry `SOURCES`."""
