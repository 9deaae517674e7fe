"""The whole measurement of a conversion on tiny models, and what it says of answers that loop."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.quality.real import measure
from benchmarks.results import read_rows

MODEL = (
    "model=recipes/assets/tiny_idlm",
    "base=recipes/assets/tiny_ar",
    "arm=tiny",
    "device=cpu",
    "deterministic=false",
)
SMALL = ("max_tokens=12", "prompts=2", "draws=3", "concurrency=1", "rounds=1", "batch=4", "max_length=128")


def test_rows_of_a_tiny_conversion(tmp_path: Path) -> None:
    prompts, tasks = tmp_path / "prompts.jsonl", tmp_path / "tasks.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{one} + 2 ="}) + "\n" for one in range(2)))
    docs = [["Mia has 5 nuts. Mia", ["breaks 2.", "zzz"], 0], ["Mia has", ["5"], 0]]
    tasks.write_text(json.dumps({"task": "nuts", "docs": docs}))
    files = (f"sets=chat:{prompts},more:{prompts}", f"tasks={tasks}", f"results={tmp_path}", "record=true")
    measure([*MODEL, *SMALL, *files])
    rows = read_rows("real", results=tmp_path)
    found: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        found.setdefault(row["metric"], []).append(row)
    settings = {(row["case"]["set"], row["case"]["temperature"]) for row in found["tokens_per_forward"]}
    assert settings == {(name, temperature) for name in ("chat", "more") for temperature in (0.0, 1.0)}
    assert all(row["baseline"] for row in found["tokens_per_forward"])
    [kl], [law] = found["clean_kl"], found["law_tv"]
    assert kl["value"] > 0 and 0 <= found["clean_agreement"][0]["value"] <= 1
    assert law["floor"] is not None and 0 <= law["value"] <= 1
    assert [row["case"]["judge"] for row in found["task_accuracy"]] == ["sum", "per character"]
    assert {row["case"]["concurrency"] for row in found["speed_over_ar"]} == {1}
