"""Checks of this folder, which run in Triton's interpreter alone."""

from tests.kernels.patched_triton import patch_once

patch_once()
