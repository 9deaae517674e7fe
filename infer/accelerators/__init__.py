"""Accelerators: plug-ins that thin one side of the score matrix. One file each, found by `ACCELERATORS`."""
