"""Linear layers of few rows at the speed of reading the weight; contract in README.md."""

from idlm.kernels.library import library_linear
from idlm.kernels.linear.fp8 import Fp8Weight, quantise_fp8
from idlm.kernels.linear.op import Linears, check_rows_agree, linear, linear_swiglu
from idlm.kernels.linear.reference import dequantised, linear_reference, linear_swiglu_reference
