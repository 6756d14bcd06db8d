"""What is kept of a search of a step for one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Summary = dict[str, Any]


def summary_of(result: Mapping[str, Any]) -> Summary:
    """The best plan and the baseline, which splits the batch alone, of what `automesh search
    --json` prints.

    Returns:
      `error` alone if the search failed; else `best`, its time in seconds and memory in bytes, the
      same of `dp`, their ratio, the logical axes that were searched, and how many plans were
      measured, and refused because their numerics differ from those of one device.
    """
    if "error" in result:
        return {"error": result["error"]}
    best, candidates = result["best"], result["candidates"]
    found: Summary = {
        "searched": sorted(candidates[0]["mapping"]) if candidates else [],
        "plans": result["funnel"]["legal"],
    }
    if best is not None:
        found |= {"best": best["plan"], "evidence": best["evidence"], "step_s": best["step_s"]}
    for one in candidates:
        if best is not None and one["plan"] == best["plan"]:
            found["peak_bytes"] = one["peak_bytes"]
        if one["is_baseline"]:
            step_s = one["outcome"].get("step_s")
            found |= {"dp": one["plan"].split()[0], "dp_s": step_s}
            found["dp_peak_bytes"] = one["peak_bytes"]
            found["dp_fits"] = _fits(one, result)
            if step_s and best is not None and best["step_s"]:
                found["faster_than_dp"] = step_s / best["step_s"]
    funnel = result["funnel"]
    if funnel["measured"] or funnel["refused"]:
        # What disagrees with one device is refused, and never measured.
        found |= {"measured": funnel["measured"], "refused": funnel["refused"]}
    return found


def _fits(candidate: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Whether a plan fits into a device, by what is known of it."""
    if candidate["outcome"]["kind"] == "out_of_memory":
        return False
    peak, limit = candidate["peak_bytes"], result["device_memory_bytes"]
    return peak is None or limit is None or peak <= limit - (result["reserve_bytes"] or 0)
