"""Mixture of experts: routing and expert networks; contract in README.md."""

from idlm.kernels.experts.op import experts, route
from idlm.kernels.experts.reference import Routing, experts_reference, route_reference

__all__ = ["Routing", "experts", "experts_reference", "route", "route_reference"]
