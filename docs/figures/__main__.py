"""Draw the figures of README.md and docs/ as SVG, light and dark: `python -m docs.figures`."""

from __future__ import annotations

from pathlib import Path

from docs.figures.charts import speedup
from docs.figures.diagrams import layouts, life, one_pass
from docs.figures.evidence import evidence
from docs.figures.style import THEMES, Draw, svg

FOLDER = Path(__file__).resolve().parent
FIGURES: dict[str, Draw] = {
    "one-pass": one_pass,
    "layouts": layouts,
    "life": life,
    "speedup": speedup,
    "evidence": evidence,
}


def drawn() -> dict[str, str]:
    """The SVG text of every variant, by file name."""
    return {
        f"{name}-{theme.name}.svg": svg(draw, theme) for name, draw in FIGURES.items() for theme in THEMES
    }


if __name__ == "__main__":
    for name, text in drawn().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
