"""Which tensors of a planned pass end with which of its calls, for tests that destroy them there."""

from __future__ import annotations

from idlm.infer.mosaic.lifetimes import Sizes
from idlm.infer.mosaic.template import Step, Template


def ends_with(template: Template, sizes: Sizes, step: Step) -> list[str]:
    """Tensors, not their aliases, whose bytes nothing needs after a call. Results never end."""
    ops, found = template.ops, []
    body = [position for position, op in enumerate(ops) if op.in_layers]
    loop = step.op.loop
    is_last_chunk = loop is None or step.stop == sizes.num_rows(loop.rows)
    is_last_layer = not step.op.in_layers or step.layer == template.num_layers - 1
    for storage in template.lifetimes.storages:
        position = storage.last
        if position == len(ops) - 1:
            continue
        while position and ops[position].is_barrier:
            position -= 1
        if position != step.position:
            continue
        positions = range(storage.first, storage.last + 1)
        is_per_chunk = all(ops[position].loop == loop for position in positions)
        is_per_layer = not body or (body[0] <= storage.first and storage.last <= body[-1])
        if (is_last_chunk or is_per_chunk) and (is_last_layer or is_per_layer):
            found.append(storage.name)
    return found
