// The table of all plans: sorted and filtered here, a page of rows at a time.
const PAGE_ROWS = matchMedia("(max-width: 720px)").matches ? 8 : 20;
const TABLE_COLUMNS = [
  { key: "rank", head: "rank", right: true },
  { key: "plan", head: "plan", text: true },
  { key: "evidence", head: "evidence", text: true },
  { key: "step_s", head: "step time", right: true },
  { key: "ratio", head: "vs exported", right: true },
  { key: "peak_bytes", head: "memory per device", right: true },
  { key: "bound_by", head: "bound by", text: true },
  { key: "reason", head: "remark", text: true },
];

function interval(row) {
  if (!row.low_s || !row.high_s) return "";
  const what = ["compiled", "estimated"].includes(row.evidence) ? "bracket " : "";
  return `${what}${Format.seconds(row.low_s)} to ${Format.seconds(row.high_s)}`;
}

function ratioCell(row, exportedWord) {
  if (row.ratio === null || row.ratio === undefined) return [""];
  const said = row.versus && !/^[+-]?\d/.test(row.versus) ? row.versus : Format.change(row.ratio);
  const first = ["new", "kept", "best"].includes(row.verdict) && row.rank ? exportedWord : said;
  const more = row.ratio_low && first === said ? `${Format.factor(row.ratio_low)} to ${Format.factor(row.ratio_high)}` : "";
  const ratio = first === said && /^[+-]/.test(said) ? "" : row.verdict && first !== exportedWord ? Format.change(row.ratio) : "";
  return [first, ratio, more];
}

function plansTable(rows, exportedWord) {
  const state = { by: "place", down: false, text: "", evidence: "", page: 0 };
  rows.forEach((row, place) => {
    row.place = place;
    row.haystack = `${row.plan} ${row.evidence} ${row.verdict} ${row.bound_by || ""} ${row.reason || ""}`.toLowerCase();
  });
  const body = el("tbody");
  const count = el("span", { role: "status", id: "plan-count" });
  const previous = el("button", { type: "button" }, "Previous");
  const next = el("button", { type: "button" }, "Next");
  const heads = TABLE_COLUMNS.map((column) => {
    const button = el("button", { type: "button", on: { click: () => sort(column) } }, column.head);
    return el("th", { scope: "col", class: column.right ? "right" : null, "data-key": column.key }, button);
  });
  const table = el("table", { class: "plans", id: "plan-table" },
    el("caption", { class: "hidden" }, "All plans"), el("thead", {}, el("tr", {}, heads)), body);

  function sort(column) {
    // A third click takes the ranking back.
    if (state.by !== column.key) Object.assign(state, { by: column.key, down: false });
    else if (!state.down) state.down = true;
    else Object.assign(state, { by: "place", down: false });
    state.page = 0;
    show();
  }
  function chosen() {
    const wanted = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => (!state.evidence || row.evidence === state.evidence)
      && wanted.every((word) => row.haystack.includes(word)));
    const sign = state.down ? -1 : 1;
    return found.sort((a, b) => {
      const [one, other] = [a[state.by], b[state.by]];
      const [isEmpty, otherEmpty] = [one === null || one === undefined, other === null || other === undefined];
      if (isEmpty || otherEmpty) return isEmpty - otherEmpty || a.place - b.place;
      return sign * (one < other ? -1 : one > other ? 1 : 0) || a.place - b.place;
    });
  }
  function cell(name, attributes, ...parts) {
    const isEmpty = parts.every((part) => part === "" || part === null || part === undefined);
    const kind = [attributes.class, isEmpty && "empty"].filter(Boolean).join(" ");
    return el("td", { ...attributes, class: kind || null, "data-name": name }, parts);
  }
  function line(row) {
    const [versus, change, span] = ratioCell(row, exportedWord);
    const exported = ["new", "kept", "best"].includes(row.verdict) && row.rank;
    const kinds = [exported && "exported", row.is_baseline && "baseline"].filter(Boolean).join(" ");
    const small = (text) => (text ? el("small", {}, text) : "");
    const evidence = ["measured", "compiled", "estimated"].includes(row.evidence) ? row.evidence : "none";
    return el("tr", { class: kinds || null },
      cell("rank", { class: "right" }, row.rank ?? ""),
      cell(null, { class: "plan" }, row.plan),
      cell(null, {}, el("span", { class: `badge ${evidence}` }, row.evidence)),
      cell("step", { class: "right" }, Format.seconds(row.step_s), small(interval(row))),
      cell("against", { class: "right" }, versus, small([change, span].filter(Boolean).join(", "))),
      cell("memory", { class: "right" }, Format.bytes(row.peak_bytes), small(row.peak_kind)),
      cell("bound by", {}, row.bound_by ?? ""),
      cell(null, { class: "why" }, row.reason ?? ""));
  }
  function show() {
    const found = chosen();
    const pages = Math.max(1, Math.ceil(found.length / PAGE_ROWS));
    state.page = Math.min(state.page, pages - 1);
    const start = state.page * PAGE_ROWS;
    const shown = found.slice(start, start + PAGE_ROWS);
    body.replaceChildren(...shown.map(line));
    heads.forEach((head) => {
      const mine = head.dataset.key === state.by;
      if (mine) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
      head.firstChild.textContent = TABLE_COLUMNS.find((one) => one.key === head.dataset.key).head
        + (mine ? (state.down ? " \u25bc" : " \u25b2") : "");
    });
    count.textContent = found.length
      ? `${(start + 1).toLocaleString("en")} to ${(start + shown.length).toLocaleString("en")} of ${Format.plural(found.length, "plan")}`
        + (found.length < rows.length ? ` (${rows.length.toLocaleString("en")} in all)` : "")
      : "no plan matches";
    previous.disabled = state.page === 0;
    next.disabled = state.page >= pages - 1;
  }
  previous.addEventListener("click", () => { state.page -= 1; show(); });
  next.addEventListener("click", () => { state.page += 1; show(); });
  const search = el("input", { type: "search", id: "plan-filter", placeholder: "for example: fsdp:8 remat=full",
    "aria-label": "Filter plans by words", on: { input: () => { state.text = search.value; state.page = 0; show(); } } });
  const kinds = [...new Set(rows.map((row) => row.evidence))];
  const kind = choice("evidence", [["", "all"], ...kinds.map((one) => [one, one])], "", (value) => {
    state.evidence = value; state.page = 0; show();
  });
  const order = choice("sort by", [["place", "ranking"], ...TABLE_COLUMNS.slice(1).map((one) => [one.key, one.head])], "place",
    (value) => { Object.assign(state, { by: value, down: false, page: 0 }); show(); });
  show();
  return [
    el("div", { class: "bar" }, el("label", {}, "filter ", search), kind, el("span", { class: "only-narrow" }, order)),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "All plans" }, table),
    el("div", { class: "pager" }, previous, next, count),
  ];
}
