"""Residual addition and RMSNorm in one pass; contract in README.md."""

from idlm.kernels.rms_norm.op import add_rms_norm
