"""Random templates, and a simulation of their execution that knows nothing of lifetimes.

The simulation walks the steps, marks what each write overwrites, and fails when an op reads a tensor that
something else has overwritten. A tensor that outlives a loop is written in slices: only the first iteration
makes it valid again."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from idlm.infer.mosaic.planner import ALIGNMENT, ArenaPlan
from idlm.infer.mosaic.template import LENGTH, WANTED, Loop, OpCall, PassTemplate, Size, Sizes


class Corrupted(AssertionError):
    """A plan that would overwrite something that is still needed."""


@dataclass
class _Writer:
    """Draws the ops of one template."""

    rng: random.Random
    template: PassTemplate
    usable: list[str] = field(default_factory=list)
    local: dict[str, list[str]] = field(default_factory=dict)
    num_tensors: int = 0

    def new(self, loop: Loop | None) -> str:
        rng, name = self.rng, f"t{self.num_tensors}"
        self.num_tensors += 1
        is_local = loop is not None and rng.random() < 0.6
        rows = loop.rows if loop is not None and is_local else rng.choice((LENGTH, WANTED))
        chunks = loop.chunks if loop is not None and is_local else None
        constant = rng.choice((0, 0, rng.randrange(5000)))
        size = Size(row_bytes=rng.randrange(1, 900), rows=rows, chunks=chunks, constant=constant)
        self.template.add_tensor(name, size)
        target = self.local.setdefault(loop.name, []) if loop is not None and is_local else self.usable
        target.append(name)
        return name

    def add(self, loop: Loop | None, op: str) -> None:
        rng = self.rng
        known = self.usable + (self.local.get(loop.name, []) if loop is not None else [])
        # Names whose storage is written already; others have just been registered.
        reads = rng.sample(known, min(len(known), rng.randrange(4)))
        writes = [self.new(loop) if not known or rng.random() < 0.6 else rng.choice(known)]
        if known and rng.random() < 0.2:
            writes.append(rng.choice(known))
        self.template.add_op(op, reads, dict.fromkeys(writes), chunks=loop)


def random_template(seed: int) -> tuple[PassTemplate, Sizes]:
    """Return a template with loops and layers, and sizes to plan it for."""
    rng = random.Random(seed)
    writer = _Writer(rng, PassTemplate(f"random {seed}"))

    def groups(part: str, num_groups: int) -> None:
        for group in range(num_groups):
            loop = None
            if rng.random() < 0.6:
                name = f"{part}{group}"
                loop = Loop(name=name, rows=rng.choice((LENGTH, WANTED)), chunks=rng.choice("abc"))
            for op in range(rng.randrange(1, 4)):
                writer.add(loop, f"{part}{group}.{op}")

    groups("before", rng.randrange(2))
    with writer.template.layers(rng.randrange(1, 3)):
        groups("layer", rng.randrange(1, 4))
    groups("after", rng.randrange(2))
    if writer.usable:
        writer.template.add_op("end", rng.sample(writer.usable, min(2, len(writer.usable))))
    length = rng.randrange(2, 60)
    chunks = {name: rng.randrange(1, 4) for name in "abc"}
    return writer.template, Sizes(length=length, wanted=rng.randrange(1, length + 1), chunks=chunks)


def check_positions(plan: ArenaPlan) -> None:
    """Everything lies inside the workspace, aligned, and no peak is below the bytes alive."""
    for name, offset in plan.offsets.items():
        assert offset % ALIGNMENT == 0
        assert offset >= 0 and offset + plan.num_bytes[name] <= plan.peak_bytes, name
    assert plan.peak_bytes >= plan.live_bytes > 0


def _overlaps(plan: ArenaPlan) -> dict[str, list[str]]:
    """For each storage, the others that share bytes with it."""
    ends = {name: plan.offsets[name] + num_bytes for name, num_bytes in plan.num_bytes.items()}
    spans = sorted((plan.offsets[name], end, name) for name, end in ends.items())
    found: dict[str, list[str]] = {name: [] for name in ends}
    for op, (_, end, name) in enumerate(spans):
        for start, _, other in spans[op + 1 :]:
            if start >= end:
                break
            found[name].append(other)
            found[other].append(name)
    return found


def _homes(template: PassTemplate) -> dict[str, tuple[set[Loop | None], set[bool]]]:
    """For each storage, the loops that use it, and whether the layers and the rest do."""
    homes: dict[str, tuple[set[Loop | None], set[bool]]] = {}
    for op in template.ops:
        for name in (*op.reads, *op.writes):
            loops, layers = homes.setdefault(name, (set(), set()))
            loops.add(op.loop)
            layers.add(op.in_layers)
    return homes


def simulate(plan: ArenaPlan, *inputs: str) -> int:
    """Walk the steps of a plan; return their number. Corrupted if a read finds something else."""
    template = plan.template
    overlaps, homes = _overlaps(plan), _homes(template)
    overlaps |= {name: [] for name in inputs}
    valid, ended, num_steps = set(inputs), set[str](), 0
    for step in plan.steps():
        num_steps += 1
        op = step.op
        reads, writes = set(op.reads), set(op.writes)
        if not reads <= valid:
            raise Corrupted(
                f"{op.name} reads {reads - valid} in layer {step.layer}, rows from {step.start} on"
            )
        used = reads | writes
        for name in used:
            if not used.isdisjoint(overlaps[name]):
                raise Corrupted(f"{op.name} uses {name} and {overlaps[name]}")
        for name in writes:
            valid.difference_update(overlaps[name])
            loops, layers = homes[name]
            is_again = (step.start > 0 and len(loops) > 1) or (step.layer > 0 and len(layers) > 1)
            if not is_again:
                valid.add(name)
        # What ends here may be overwritten with anything.
        ends = ends_with(template, plan.sizes, step)
        valid.difference_update(ends)
        ended.update(ends)
    missing = {storage.name for storage in template.lifetimes.storages} - ended
    if missing and num_steps:
        raise Corrupted(f"{missing} never end")
    return num_steps


def ends_with(template: PassTemplate, sizes: Sizes, step: OpCall) -> list[str]:
    """Tensors whose bytes nothing needs after a call."""
    ops, found = template.ops, []
    body = [position for position, op in enumerate(ops) if op.in_layers]
    loop = step.op.loop
    is_last_chunk = loop is None or step.stop == sizes.num_rows(loop.rows)
    is_last_layer = not step.op.in_layers or step.layer == template.num_layers - 1
    for storage in template.lifetimes.storages:
        position = storage.last
        if position != step.position:
            continue
        positions = range(storage.first, storage.last + 1)
        is_per_chunk = all(ops[position].loop == loop for position in positions)
        is_per_layer = not body or (body[0] <= storage.first and storage.last <= body[-1])
        if (is_last_chunk or is_per_chunk) and (is_last_layer or is_per_layer):
            found.append(storage.name)
    return found
