"""config.json of released models, one a line of released_configs.json: the keys that published files have,
with values where the loader looks at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RELEASED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
