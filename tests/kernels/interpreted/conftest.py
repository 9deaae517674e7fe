"""Checks of this folder, which run in Triton's interpreter alone.

pytest imports this file also in the process of all other tests, which compiles kernels."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.patched_triton import patch_once

    patch_once()
