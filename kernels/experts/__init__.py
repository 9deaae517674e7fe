"""Mixture of experts: routing and expert networks; contract in README.md."""

from idlm.kernels.experts.op import experts, route
from idlm.kernels.experts.steps import add_experts, expert_hidden, expert_outputs, sort_pairs, tile_bytes
from idlm.kernels.experts.types import Routing
