"""Sums of rows over the GPUs of a host, with residual addition and RMSNorm; contract in README.md."""

from idlm.kernels.peer_sum.boxes import PeerBoxes, PeerMemory, open_memory
from idlm.kernels.peer_sum.op import peer_sum_rms_norm
