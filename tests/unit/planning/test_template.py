"""The registrar: lifetimes over loops and layers, and the steps of a template."""

from __future__ import annotations

from idlm.infer.mosaic.planner import plan_template
from idlm.infer.mosaic.template import LENGTH, WANTED, Loop, PassTemplate, Size, Sizes

LOOP = Loop(name="loop", rows=LENGTH, chunks="k")
ROW = Size(row_bytes=512)
CHUNK = Size(row_bytes=512, chunks="k")


def lifetime(template: PassTemplate, name: str) -> tuple[int, int]:
    [storage] = [one for one in template.lifetimes.storages if one.name == name]
    return storage.first, storage.last


def small_template() -> PassTemplate:
    """x is made before the layers; each layer makes a and b, writes c in chunks, and adds c to x."""
    template = PassTemplate("small")
    for name in "xac":
        template.add_tensor(name, ROW)
    template.add_tensor("b", CHUNK)
    template.add_op("embed", ["ids"], ["x"])  # 0
    with template.layers(3):
        template.add_op("norm", ["x"], ["a"])  # 1
        template.add_op("up", ["a"], ["b"], chunks=LOOP)  # 2
        template.add_op("down", ["b"], ["c"], chunks=LOOP)  # 3
        template.add_op("add", ["c", "x"], ["x"])  # 4
    template.add_op("end", ["x"], [])  # 5
    return template


def test_lifetimes_cover_loops_and_layers() -> None:
    template = small_template()
    assert lifetime(template, "x") == (0, 5)
    assert lifetime(template, "a") == (1, 3), "read in the loop, so it lives to the end of the loop"
    assert lifetime(template, "b") == (2, 3)
    assert lifetime(template, "c") == (2, 4), "written in slices from the first iteration on"


def test_steps_follow_layers_and_chunks() -> None:
    template = small_template()
    sizes = Sizes(length=10, chunks={"k": 3})
    plan = plan_template(template, sizes)
    steps = list(plan.steps())
    body = ["norm", *["up", "down"] * 3, "add"]
    assert [step.op.name for step in steps] == ["embed", *body * 3, "end"]
    up = [step for step in steps if step.op.name == "up"]
    assert [(step.layer, step.start, step.stop) for step in up[:4]] == [
        (0, 0, 4),
        (0, 4, 8),
        (0, 8, 10),
        (1, 0, 4),
    ]
    assert up[0].offsets == {name: plan.offsets[name] for name in "ab"}
    assert (steps[1].start, steps[1].stop) == (0, 10) and not next(template.steps(sizes)).offsets
    template = PassTemplate("head")
    loop = Loop(name="head", rows=WANTED, chunks="k")
    template.add_tensor("logits", Size(row_bytes=4, rows=WANTED, chunks="k", constant=7))
    template.add_op("logits", [], ["logits"], chunks=loop)
    assert not list(template.steps(Sizes(length=5, wanted=0)))
    assert plan_template(template, Sizes(length=5)).num_bytes == {"logits": 7}


def test_a_count_that_does_not_divide_runs_fewer_chunks() -> None:
    steps = list(small_template().steps(Sizes(length=10, chunks={"k": 7})))
    rows = [(step.start, step.stop) for step in steps if step.op.name == "up" and not step.layer]
    assert rows == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]


def test_sizes_count_rows_of_a_chunk() -> None:
    sizes = Sizes(length=1001, wanted=7, chunks={"k": 4})
    size = Size(row_bytes=3, repeat=8, chunks="k", constant=5)
    assert (size.num_rows(sizes), size.num_bytes(sizes)) == (251 * 8, 251 * 8 * 3 + 5)
    assert str(size) == "3 B x 8 x length / K_k + 5 B"
    assert Size(row_bytes=2, rows=WANTED).num_bytes(sizes) == 14
    huge = Sizes(length=3_000_000)
    assert Size(row_bytes=126464 * 2).num_bytes(huge) == 758_784_000_000
