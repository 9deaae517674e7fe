"""Products of a few float32 rows by oneDNN's copies of weights."""

from __future__ import annotations

import gc

import pytest
import torch

from idlm.kernels import backend
from idlm.kernels.backend import library_linear


@pytest.fixture
def packs_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(backend, "_packs_weights", lambda: True)


@pytest.mark.usefixtures("packs_weights")
@pytest.mark.parametrize("num_rows", [*range(1, 10), 31, 32, 33])
def test_a_large_product_of_few_rows_is_as_near_as_sums_in_order(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x_RD, weight_ED, bias_E = (
        torch.randn(shape, generator=generator) for shape in ((num_rows, 1043), (515, 521), (515,))
    )
    x_RD = x_RD[:, :521]
    exact_RE = x_RD.double() @ weight_ED.double().T
    in_order_RE = torch.zeros_like(exact_RE)
    for x_R, weight_E in zip(x_RD.double().T, weight_ED.double().T, strict=True):
        in_order_RE = (in_order_RE + x_R[:, None] * weight_E).float().double()
    bound = 1.01 * (in_order_RE - exact_RE).norm()
    found_RE = library_linear(x_RD, weight_ED, of_model=True)
    assert found_RE.is_contiguous() and (found_RE - exact_RE).norm() <= bound
    out_RE = torch.full_like(found_RE, torch.nan)
    library_linear(x_RD, weight_ED, bias_E=bias_E, out_RE=out_RE, of_model=True)
    torch.testing.assert_close(out_RE, found_RE + bias_E)
    x_RD[-1] = torch.nan
    found_RE = library_linear(x_RD, weight_ED, of_model=True)
    assert found_RE[:-1].isfinite().all(), "a row that is not finite changes no other"


@pytest.mark.usefixtures("packs_weights")
def test_a_copy_of_a_weight_follows_it_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_ED, x_RD = torch.randn(512, 520), torch.randn(3, 520)
    first_RE = library_linear(x_RD, weight_ED, of_model=True)
    assert weight_ED in backend._packed
    weight_ED.mul_(2)
    torch.testing.assert_close(library_linear(x_RD, weight_ED, of_model=True), 2 * first_RE)
    num_copies = len(backend._packed)
    del weight_ED
    gc.collect()
    assert len(backend._packed) == num_copies - 1
    monkeypatch.setattr(backend, "PACKED_BYTES", sum(weight.nbytes for weight in backend._packed))
    weight_ED = torch.randn(512, 520, requires_grad=True)
    assert library_linear(x_RD, weight_ED, of_model=True).requires_grad
    library_linear(x_RD, weight_ED.detach(), of_model=True)
    assert len(backend._packed) == num_copies - 1, "no copy of a weight that is trained, or beyond the bound"
