"""Feed-forward networks of which each row chooses a few; contract in README.md."""

from idlm.kernels.experts.op import Routing, experts, route
from idlm.kernels.experts.reference import experts_reference, route_reference

__all__ = ["Routing", "experts", "experts_reference", "route", "route_reference"]
