"""Accelerators: plug-ins that compute only part of attention: one file each, found by `ACCELERATORS`."""
