"""The product of many rows for Hopper (sm_90) in Gluon: y^T = W x^T tile by tile, by a warp that only loads
and warpgroups that only multiply.

Shares, their order and all rounding equal those of `kernel.linear_kernel`: a share starts from zero, the
same matrix instruction, 64 outputs high, sums its columns in order, and shares are added in order. The width
of that instruction, which is the number of rows of a tile, does not affect a row's bits (tests/gpu compares
them).

One warp copies tiles of the weight and of rows into a ring in shared memory, from tile to tile;
each of GROUPS warpgroups multiplies its own 64 outputs (64 of gate and 64 of up if GATED). `full` completes
when a stage has been copied, `free` when all groups have read it. A group frees a stage once the next product
is under way. Gluon is the lower level of Triton and cannot be interpreted: tests/gpu checks this file,
tests/kernels compiles it, and interpreted runs take Triton's kernel.

R rows, D input width, E output width."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from idlm.kernels.linear import groups
from idlm.kernels.linear.kernel import QUANTUM

STEP: gl.constexpr = gl.constexpr(groups.STEP)
OUTPUTS: gl.constexpr = gl.constexpr(groups.OUTPUTS)
QUANTUM_STEPS: gl.constexpr = gl.constexpr(QUANTUM.value // groups.STEP)
BAND: gl.constexpr = gl.constexpr(groups.BAND)
REGISTERS = {2: 232, 3: 160}
"""Of a thread of each of so many warpgroups, next to a warp that only loads."""
LOADER_REGISTERS = 24
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Of the threads of a warpgroup, once there are several. Triton 3.6 calls it `thread_barrier`."""


@gluon.jit
def _first_step(split, splits, steps):
    return split * ((steps + QUANTUM_STEPS - 1) // QUANTUM_STEPS) // splits * QUANTUM_STEPS


@gluon.jit
def _tile_at(tile, tiles_r, tiles_e):
    """(tile of rows, tile of outputs). Tiles under way at a time share few rows and outputs, which the L2
    cache holds."""
    first = tile // (BAND * tiles_e) * BAND
    height = gl.minimum(tiles_r - first, BAND)
    within = tile - first * tiles_e
    return first + within % height, within // height


@gluon.jit
def _copy_weight(stage, tile_e, step, up_row, desc_w, w_smem, bar, SHAPE: gl.constexpr, BYTES: gl.constexpr):
    """Start to copy a step of the weight, and announce the bytes of the whole stage."""
    GROUPS: gl.constexpr = SHAPE[0]
    PARTS: gl.constexpr = SHAPE[1]
    mbarrier.expect(bar, BYTES)
    for tile in gl.static_range(GROUPS * PARTS):
        e = tile_e * (OUTPUTS * GROUPS) + tile // PARTS * OUTPUTS + tile % PARTS * up_row
        to = w_smem.index(stage * (GROUPS * PARTS) + tile)
        tma.async_copy_global_to_shared(desc_w, [e, step * STEP], bar, to)


@gluon.jit
def _load(tensors, sizes, SHAPE: gl.constexpr, PDL: gl.constexpr):
    """The warp that loads. The first stages of the weight do not wait for the previous kernel."""
    descriptors, buffers, bars = tensors
    desc_x, desc_w = descriptors[0], descriptors[1]
    x_smem, w_smem = buffers
    full, free = bars
    tiles_r, tiles_e, steps, _splits, up_row = sizes
    STAGES: gl.constexpr = full.shape[0]
    ROWS: gl.constexpr = desc_x.block_type.shape[0]
    BYTES: gl.constexpr = desc_x.block_type.nbytes + SHAPE[0] * SHAPE[1] * desc_w.block_type.nbytes
    n = 0
    for tile in range(gl.program_id(0), tiles_r * tiles_e, gl.num_programs(0)):
        tile_r, tile_e = _tile_at(tile, tiles_r, tiles_e)
        ahead = gl.where(n == 0, gl.minimum(steps, STAGES), 0)
        for k in range(ahead):
            _copy_weight(k, tile_e, k, up_row, desc_w, w_smem, full.index(k), SHAPE, BYTES)
        if PDL:
            gdc_wait()
        for k in range(steps):
            stage = n % STAGES
            bar = full.index(stage)
            if k >= ahead:
                mbarrier.wait(free.index(stage), ((n // STAGES) & 1) ^ 1)
                _copy_weight(stage, tile_e, k, up_row, desc_w, w_smem, bar, SHAPE, BYTES)
            tma.async_copy_global_to_shared(desc_x, [tile_r * ROWS, k * STEP], bar, x_smem.index(stage))
            n += 1
    if PDL:
        gdc_launch_dependents()


@gluon.jit
def _share(n, num, buffers, bars, zero, GROUP: gl.constexpr, PARTS: gl.constexpr):
    """The product over `num` steps from step `n` of the program on; and that of up if PARTS is 2."""
    x_smem, w_smem = buffers
    full, free = bars
    STAGES: gl.constexpr = full.shape[0]
    TILES: gl.constexpr = w_smem.shape[0] // STAGES
    acc, up = zero, zero
    for k in range(num):
        stage = (n + k) % STAGES
        mbarrier.wait(full.index(stage), ((n + k) // STAGES) & 1)
        x = x_smem.index(stage).permute((1, 0))
        w = w_smem.index(stage * TILES + GROUP * PARTS)
        acc_next = warpgroup_mma(w, x, acc, use_acc=k > 0, is_async=True)
        if PARTS == 2:
            w_up = w_smem.index(stage * TILES + GROUP * PARTS + 1)
            up_next = warpgroup_mma(w_up, x, up, use_acc=k > 0, is_async=True)
            acc, up = warpgroup_mma_wait(2, deps=(acc_next, up_next))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc_next,))
        # All warps of the group have read the stage before.
        barrier()
        mbarrier.arrive(free.index((n + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
    if PARTS == 2:
        acc, up = warpgroup_mma_wait(0, deps=(acc, up))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    barrier()
    mbarrier.arrive(free.index((n + num + STAGES - 1) % STAGES), count=1)
    return acc, up


@gluon.jit
def _rounded(acc, bias_E, first, num_outputs, dtype: gl.constexpr):
    """The product as a linear returns it: biased and rounded; in fp32 again."""
    if bias_E is not None:
        o_e = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, acc.type.layout))
        bias = gl.load(bias_E + first + o_e, mask=o_e < num_outputs, other=0.0)
        acc = acc + bias.to(gl.float32)[:, None]
    return acc.to(dtype).to(gl.float32)


@gluon.jit
def _store(acc, up, bias_E, at, num_outputs, out, desc_y, PARTS: gl.constexpr):
    """Bias, SwiGLU and store of a tile; `at`: its first row and output, `num_outputs`: of the product."""
    dtype: gl.constexpr = desc_y.dtype
    y = _rounded(acc, bias_E, at[1], num_outputs - at[1], dtype)
    if PARTS == 2:
        up = _rounded(up, bias_E, num_outputs + at[1], num_outputs - at[1], dtype)
        # As `rounded_swiglu`, which is Triton's.
        y = (y / (1.0 + gl.exp(-y))).to(dtype).to(gl.float32) * up
    tma.store_wait(0)
    barrier()
    out.permute((1, 0)).store(y.to(dtype))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(desc_y, [at[0], at[1]], out)


@gluon.jit
def _multiply(tensors, sizes, epilogue, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """A warpgroup: products of its outputs in all tiles of its program, and their store."""
    descriptors, buffers, bars = tensors
    bias_E, out_smem = epilogue
    desc_y = descriptors[2]
    GROUPS: gl.constexpr = SHAPE[0]
    PARTS: gl.constexpr = SHAPE[1]
    IS_SPLIT: gl.constexpr = SHAPE[2]
    tiles_r, tiles_e, steps, splits, num_outputs = sizes
    ROWS: gl.constexpr = desc_y.block_type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zero = gl.zeros([OUTPUTS, ROWS], gl.float32, layout)
    n = 0
    for tile in range(gl.program_id(0), tiles_r * tiles_e, gl.num_programs(0)):
        tile_r, tile_e = _tile_at(tile, tiles_r, tiles_e)
        if IS_SPLIT:
            acc, up = zero, zero
            for s in range(splits):
                first = _first_step(s, splits, steps)
                num = gl.minimum(_first_step(s + 1, splits, steps), steps) - first
                part, part_up = _share(n, num, buffers, bars, zero, GROUP, PARTS)
                acc, up = acc + part, up + part_up
                n += num
        else:
            acc, up = _share(n, steps, buffers, bars, zero, GROUP, PARTS)
            n += steps
        at = tile_r * ROWS, (tile_e * GROUPS + GROUP) * OUTPUTS
        _store(acc, up, bias_E, at, num_outputs, out_smem.index(GROUP), desc_y, PARTS)
    tma.store_wait(0)


@gluon.jit
def _barriers(NUM: gl.constexpr, COUNT: gl.constexpr):
    """One barrier for each stage of the ring."""
    bars = gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(NUM):
        mbarrier.init(bars.index(stage), count=COUNT)
    return bars


@gluon.jit(do_not_specialize=["R", "E", "D", "splits"])
def many_rows_kernel(
    desc_x, desc_w, desc_y, bias_E, R, E, D, splits,
    GROUPS: gl.constexpr, GATED: gl.constexpr, IS_SPLIT: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Tiles of rows and outputs in turn, each over all shares. GATED: the weight has 2E rows, gate before up,
    and the output is silu(gate) * up."""
    PARTS: gl.constexpr = 2 if GATED else 1
    ROWS: gl.constexpr = desc_x.block_type.shape[0]
    x_smem = gl.allocate_shared_memory(desc_x.dtype, [STAGES, ROWS, STEP], desc_x.layout)
    w_smem = gl.allocate_shared_memory(desc_x.dtype, [STAGES * GROUPS * PARTS, OUTPUTS, STEP], desc_w.layout)
    out_smem = gl.allocate_shared_memory(desc_x.dtype, [GROUPS, ROWS, OUTPUTS], desc_y.layout)
    bars = _barriers(STAGES, 1), _barriers(STAGES, GROUPS)
    barrier()
    tiles_r = (R + ROWS - 1) // ROWS
    tiles_e = (E + OUTPUTS * GROUPS - 1) // (OUTPUTS * GROUPS)
    sizes = tiles_r, tiles_e, (D + STEP - 1) // STEP, splits, E
    tensors, epilogue = ((desc_x, desc_w, desc_y), (x_smem, w_smem), bars), (bias_E, out_smem)
    SHAPE: gl.constexpr = (GROUPS, PARTS, IS_SPLIT)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (tensors, sizes, epilogue, 0, SHAPE)),
                (_multiply, (tensors, sizes, epilogue, 1, SHAPE)),
                (_load, (tensors, sizes, SHAPE, PDL)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (tensors, sizes, epilogue, 0, SHAPE)),
                (_multiply, (tensors, sizes, epilogue, 1, SHAPE)),
                (_multiply, (tensors, sizes, epilogue, 2, SHAPE)),
                (_load, (tensors, sizes, SHAPE, PDL)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADER_REGISTERS],
        )
