"""Tiny full-diffusion checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contracts.full.canvases import FAMILIES, directory_of


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory_of("llada", tmp_path_factory.mktemp("llada"))
