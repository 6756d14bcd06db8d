"""Texts that would run code if a page took them for anything but text, and pages full of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RUN = "window.hacked=(window.hacked||0)+1"
PAYLOADS = (
    f"<script>{RUN}</script>",
    f"</script><script>{RUN}</script>",
    f"</SCRIPT ><sCrIpT>{RUN}</sCrIpT>",
    f'<img src=x onerror="{RUN}">',
    f"<img src=x onerror={RUN}//",
    f"<svg onload={RUN}>",
    f"<svg><script>{RUN}</script></svg>",
    f"</svg><svg/onload={RUN}>",
    f'<svg><animate onbegin="{RUN}" attributeName=x dur=1s>',
    f'"><img src=x onerror={RUN}>',
    f"'><img src=x onerror={RUN}>",
    f'" onmouseover="{RUN}" autofocus onfocus="{RUN}" x="',
    f"' onfocus='{RUN}' autofocus x='",
    f"` onerror=`{RUN}`",
    f"javascript:{RUN}",
    f"JaVaScRiPt&colon;{RUN}",
    f"data:text/html,<script>{RUN}</script>",
    f'<a href="javascript:{RUN}">x</a>',
    f'<iframe srcdoc="<script>parent.{RUN}</script>"></iframe>',
    f'<iframe src="javascript:parent.{RUN}"></iframe>',
    f'<object data="data:text/html,<script>parent.{RUN}</script>"></object>',
    f"<details open ontoggle={RUN}>",
    f"<body onload={RUN}>",
    f"<style>@import 'data:text/css,x';*{{background:url(javascript:{RUN})}}</style>",
    f"</style><script>{RUN}</script><style>",
    f"</title></textarea></noscript><script>{RUN}</script>",
    f"--></script><!--<script>{RUN}</script>",
    f"]]><script>{RUN}</script><![CDATA[",
    f"&lt;script&gt;{RUN}&lt;/script&gt;&#60;img src=x onerror={RUN}&#62;",
    f'\u2028{RUN}\u2029//\\u003cscript>"+{RUN}+"\\"-{RUN}-"',
    f"{{{{constructor.constructor('{RUN}')()}}}}${{{RUN}}}",
    f'<meta http-equiv="refresh" content="0;url=javascript:{RUN}"><base href="//example.invalid/">',
    f"<math><mtext><table><mglyph><style><img src=x onerror={RUN}></style>",
    "__proto__",
)
ALL = " ".join(PAYLOADS)
# Words of ours, which choose what is drawn and how: nobody else writes them.
_OURS = (
    *("made", "evidence", "known", "basis", "kind", "plans.columns[]", "funnel.steps[].step"),
    *("funnel.lost[].step", "explained[].reasons[].reason", "explained[].causes[].cause"),
)


def attacked(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a report in which every text that is not ours has all payloads.

    What names are refused before, such as those of axes, is put in all the same.
    """
    changed = _attacked(document, "")
    assert isinstance(changed, dict)
    return changed


def _attacked(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        return {key: _attacked(one, f"{path}.{key}" if path else key) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_attacked(one, f"{path}[]") for one in value]
    if not isinstance(value, str) or path.endswith(_OURS):
        return value
    # The same text becomes the same one wherever it stands: plans are known by their names. Cells
    # and parts of a drawing, of which there are hundreds, have one payload each.
    if path in ("plans.rows[][]", "timelines[].slices[][]"):
        return f"{value} {PAYLOADS[len(value) % len(PAYLOADS)]}" if value else value
    return f"{value} {ALL}"
