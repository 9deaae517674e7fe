"""Linear layers of few rows at the speed of reading the weight; contract in README.md."""

from idlm.kernels.backend import library_linear
from idlm.kernels.linear.fp8 import Fp8Weight, dequantised, quantise_fp8
from idlm.kernels.linear.op import Linears, check_rows_agree, linear, linear_swiglu
