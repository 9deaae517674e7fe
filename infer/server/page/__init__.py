"""The page of `idlm-serve` at `/`: plain files, which anybody may read. What they show they get from the
server's other routes, with the key that a person types."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response

TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    # No script or style of an answer can run, and nothing leaves for another server.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Another version of the server has other files under the same names.
    "cache-control": "no-cache",
}
FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(Path(__file__).parent.iterdir())
    if path.suffix in TYPES
}
"""Every file of the page by its path on the server."""


def add_page(app: FastAPI) -> None:
    async def answer(file: Path, _request: object) -> Response:
        return Response(file.read_bytes(), media_type=TYPES[file.suffix], headers=HEADERS)

    # The path of a request may have a prefix of its application.
    for path, file in FILES.items():
        app.add_route(path, partial(answer, file), methods=["GET"], include_in_schema=False)
