"""Markdown of reports and model cards, and reports as HTML."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
FIGURE = re.compile(r'src="([\w./-]+\.svg)"')


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(
        [*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)]
    )


def html_page(text: str, folder: Path) -> str:
    """Markdown as one HTML file that needs no other: SVG figures, with paths relative to `folder`, are
    inside. HTML in the text is shown, not interpreted."""
    from markdown_it import MarkdownIt

    def inside(figure: re.Match[str]) -> str:
        content = base64.b64encode((folder / figure[1]).read_bytes()).decode()
        return f'src="data:image/svg+xml;base64,{content}"'

    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    return f"{PAGE}{FIGURE.sub(inside, body)}</html>\n"
