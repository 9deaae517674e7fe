"""The tokenizer of the generated tasks, which no test changes."""

from __future__ import annotations

from typing import Any

import pytest

from idlm.tasks.tokenizer import save_tokenizer
from idlm.text.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return load_tokenizer(directory)
