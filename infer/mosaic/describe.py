"""The table of a plan, for `describe=memory`: every tensor with its bytes, lifetime and offset."""

from __future__ import annotations

from idlm.infer.mosaic.planner import Plan

HEADER = ("tensor", "bytes", "first op", "last op", "offset", "size")
MIB = 1 << 20


def describe_plan(plan: Plan) -> str:
    """Return the plan as text: sizes and chunks, a row per tensor, the op of the peak, totals.

    The number before an op is its position in the template, counted over the ops as registered."""
    template, lifetimes, sizes = plan.template, plan.template.lifetimes, plan.sizes
    rows: list[tuple[str, ...]] = [HEADER]
    for name, size in template.tensors.items():
        storage = lifetimes.storages[lifetimes.index_of[name]]
        formula = f"alias of {template.root(name)}" if name in template.aliases else str(size)
        first, last = (
            f"{position} {op.name}{' (layers)' if op.in_layers else ''}"
            for position, op in ((each, template.ops[each]) for each in (storage.first, storage.last))
        )
        rows.append((name, f"{plan.num_bytes[name]:,}", first, last, f"{plan.offsets[name]:,}", formula))
    chunks = ", ".join(f"K_{name}={count}" for name, count in sorted(sizes.chunks.items()))
    ratio = plan.peak_bytes / max(1, plan.live_bytes)
    peak = template.ops[plan.peak_op]
    alive = ", ".join(lifetimes.storages[index].name for index in lifetimes.alive[plan.peak_op])
    per_row = plan.peak_bytes / max(1, sizes.length) / 1024
    return "\n".join(
        [
            f"{template.name}: {sizes.length} rows, {sizes.wanted} wanted, "
            f"{template.num_layers} layers, {chunks or 'no chunks'}",
            *_table(rows),
            f"most alive at {plan.peak_op} {peak.name}: {alive}",
            f"planned {plan.peak_bytes:,} bytes ({plan.peak_bytes / MIB:.1f} MiB, {per_row:.2f} KiB a row), "
            f"most alive {plan.live_bytes:,}, ratio {ratio:.4f}",
        ]
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """Align columns; those of bytes and offsets to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    right = {HEADER.index("bytes"), HEADER.index("offset")}
    return [
        "  ".join(
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
