"""One thread for every test: toys are too small to share work, and pytest runs a process per core."""

import os

# Before torch is loaded, and for the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
