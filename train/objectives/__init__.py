"""Training objectives, one file each, found by name in the registry `OBJECTIVES`."""
