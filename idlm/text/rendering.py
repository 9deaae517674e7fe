"""Search in what a chat template has written."""

from __future__ import annotations

import html
import json


class Rendering:
    """A rendered text that is searched for others, whatever white space and escapes a template changes."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._words: str | None = None

    def has(self, text: str) -> bool:
        """Return whether the text occurs."""
        wanted = text.strip()
        if wanted in self._text:
            return True
        forms = {wanted, json.dumps(wanted)[1:-1], json.dumps(wanted, ensure_ascii=False)[1:-1]}
        forms |= {html.escape(form, quote=False) for form in forms} | {html.escape(wanted)}
        if self._words is None:
            self._words = " ".join(self._text.split())
        return any(" ".join(form.split()) in self._words for form in forms)
