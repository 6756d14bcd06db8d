"""The document of a study as one HTML file that needs nothing else: no server, no network.

The page holds the document as JSON and code that draws it. No text of a study is ever read as
HTML: the JSON is escaped so that it cannot end its element, and the code only sets text. A policy
in the page (Content-Security-Policy) lets nothing run but this code, which it names by hashes, and
lets nothing be loaded from anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from string import Template
from typing import Any

from automesh.jsonio import dumps

_STATIC = Path(__file__).parent / "static"
# Vega (drawing), Vega-Lite (charts as data), Vega-Embed (mounting, its interpreter instead of
# `eval`): as their authors publish them on npm, see `static/vendor/README.md`.
_VENDOR = ("vega.min.js", "vega-lite.min.js", "vega-embed.min.js")
_SOURCE_MAP = re.compile(r"\n//# sourceMappingURL=.*")
_CODE = ("format.js", "dom.js", "charts.js", "table.js", "sections.js", "page.js")


def page_text(document: Mapping[str, Any]) -> str:
    """Writes the HTML of a page that shows a document of `automesh.report.html.document`."""
    # The page's own code first: it shows the answer before the charts' libraries are read. Where
    # the sources of these are is of no use in a page that may load nothing.
    scripts = ["\n".join(["'use strict';", *(_read(name) for name in _CODE)])]
    scripts += [_SOURCE_MAP.sub("", _read(f"vendor/{name}")) for name in _VENDOR]
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            "style-src 'unsafe-inline'",  # Vega sizes its elements by style attributes.
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    title = f"{document['title']} - automesh"
    return Template(_read("page.html")).substitute(
        policy=policy,
        title=html.escape(title),
        style=_read("page.css"),
        plain=html.escape(plain_text(document)),
        document=_embedded(document),
        charts=_embedded(charts()),
        licenses=_read("vendor/LICENSE"),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def plain_text(document: Mapping[str, Any]) -> str:
    """Returns the answer as plain text, for readers without scripts."""
    lines = [str(document["title"]), ""]
    lines += [f"{label}: {said}" if label else f"  {said}" for label, said in document["summary"]]
    rule = document["rule"]
    lines += ["", rule["text"] or f"no rule: {rule['missing']}"]
    return "\n".join(lines)


@cache
def charts() -> Mapping[str, Any]:
    """Reads the Vega-Lite specifications of the page by name; their data is named, not in them."""
    files = sorted((_STATIC / "charts").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def _embedded(value: Any) -> str:
    """Returns JSON that is safe inside a script element: it can neither end nor comment it."""
    text = dumps(value, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _read(name: str) -> str:
    return (_STATIC / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
