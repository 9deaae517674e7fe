"""Mixture of experts: routing and expert networks; contract in README.md."""

from idlm.kernels.experts.op import experts, route
from idlm.kernels.experts.reference import experts_reference, route_reference
from idlm.kernels.experts.types import Routing

__all__ = ["Routing", "experts", "experts_reference", "route", "route_reference"]
