"""The page at `/`: one self-contained document, and the policy that keeps it so."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

SCRIPTS = ("charts.js", "figures.js", "chat.js")


@dataclass(frozen=True, slots=True)
class Page:
    """The document and the headers it goes out with."""

    text: str
    headers: dict[str, str]


@cache
def page() -> Page:
    """Put together from the files in `page/`. Its policy names the digests of its own style and
    script, so that nothing else can run in it, whatever finds its way into the document."""
    folder = files("launch.server") / "page"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    style, script = read("style.css"), "\n".join(map(read, SCRIPTS))
    text = read("index.html").replace("{{style}}", style).replace("{{script}}", script)
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Page(text, headers)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
