// The parts of the page. Each takes the document and gives elements, or null where it has nothing.

function section(id, title, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), children);
}

function takeaway(text) {
  return text ? el("p", { class: "takeaway" }, text) : null;
}

// A part that a study has nothing for: it is listed with its reason at the end of the page.
function nothing(page, title, name, reason) {
  return { title, reason: page.left_out[name] || reason || "the study holds nothing of it" };
}

function leftOutSection(parts) {
  return section("left-out", "Not on this page",
    el("dl", { class: "lines" }, parts.map(({ title, reason }) => [el("dt", {}, title), el("dd", {}, `${reason}.`)])));
}

// Names for axes of charts: without the settings that all plans share, which tell none apart.
function shortNames(plans, most) {
  const words = plans.map((plan) => plan.split(" "));
  const shared = new Set((words[0] || []).slice(1).filter((word) => words.every((each) => each.slice(1).includes(word))));
  return new Map(plans.map((plan, place) => [plan, Format.short(words[place].filter((word, at) => at === 0 || !shared.has(word)).join(" "), most)]));
}

function plansOf(page) {
  const { columns, rows } = page.plans;
  return rows.map((row) => Object.fromEntries(columns.map((name, place) => [name, row[place]])));
}

// ---- The answer -----------------------------------------------------------------------------

const EVIDENCE_WORDS = {
  measured: "measured on the devices",
  compiled: "predicted from compiled programs, not measured",
  estimated: "estimated, not compiled",
  none: "no plan may become a rule",
};

// Without a rule nothing is exported yet.
function exportedWord(page) {
  return page.rule.text ? "exported" : "fastest so far";
}

function headline(page) {
  const verdict = page.verdict;
  if (!verdict.plan) return page.plans.rows.length ? "No mesh is proven" : "Nothing was tried";
  if (verdict.label === "keep") return `Keep ${verdict.plan}`;
  return page.rule.text ? `Use ${verdict.plan}` : `Fastest so far: ${verdict.plan}`;
}

function answer(page) {
  const { sentence } = page.verdict;
  if (!sentence.startsWith("none:") || !page.rule.missing) return sentence;
  return page.rule.missing.charAt(0).toUpperCase() + page.rule.missing.slice(1);
}

function verdictSection(page) {
  const verdict = page.verdict;
  const figures = [];
  const add = (label, value, small) => figures.push(el("div", {}, el("dt", {}, label), el("dd", {}, value, small ? el("small", {}, small) : null)));
  if (verdict.step_s) {
    const span = verdict.half ? `${verdict.half} (95 % interval)` : verdict.bracket ? `between ${verdict.bracket.replace(" to ", " and ")}` : "";
    add(verdict.evidence === "measured" ? "step time" : "step time, predicted", Format.seconds(verdict.step_s), span);
  }
  if (verdict.speedup) {
    const [low, high] = verdict.speedup_interval || [1, 1];
    const span = low < high ? `95 % interval ${Format.factor(low)} to ${Format.factor(high)}` : verdict.speedup_interval ? "" : "predicted";
    if (verdict.plan !== verdict.baseline) {
      const mesh = Format.short(verdict.baseline || "", 40);
      add(`against ${mesh}`, verdict.is_tie ? "not shown faster" : `${Format.factor(verdict.speedup)} faster`, span);
    }
  }
  if (verdict.peak_bytes) {
    const limit = page.memory.limit_bytes;
    add("memory per device", Format.bytes(verdict.peak_bytes), limit ? `of ${Format.bytes(limit)}` : null);
  }
  add("devices", page.device_count.toLocaleString("en"), page.device);
  const kind = !page.rule.text ? "predicted" : { measured: "", compiled: "predicted", estimated: "predicted", none: "none" }[verdict.evidence];
  return el("div", { class: `verdict ${verdict.plan ? kind : "none"}`, id: "verdict" },
    el("span", { class: `badge ${verdict.evidence}` }, EVIDENCE_WORDS[verdict.evidence]),
    page.interrupted ? el("span", { class: "badge estimated" }, "interrupted") : null,
    el("p", { class: "answer" }, headline(page)),
    el("p", { class: "sentence" }, `${answer(page).replace(/\.$/, "")}.`),
    verdict.undecided ? el("p", { class: "sentence" }, `Still open: ${verdict.undecided}.`) : null,
    el("dl", { class: "figures" }, figures));
}

function ruleSection(page) {
  const rule = page.rule;
  const inside = rule.text
    ? [el("div", { class: "rule" },
      el("p", { class: "note" }, rule.path ? `Written to ${rule.path}; select it with automesh.load("mesh_rules.toml").select("${page.target}").` : "Put it into mesh_rules.toml beside the script."),
      el("div", { class: "bar" }, copyButton(rule.text, "the rule")),
      el("pre", { tabindex: 0, role: "region", "aria-label": "The rule" }, rule.text))]
    : [el("p", {}, `There is no rule: ${rule.missing}.`)];
  return section("rule", "The rule", inside);
}

function evidenceSection(page) {
  const lines = page.summary.filter(([label]) => !["best", "keep", "undecided"].includes(label));
  const versions = Object.entries(page.versions);
  return section("evidence", "Evidence",
    el("dl", { class: "lines" }, lines.map(([label, said]) => [el("dt", {}, label), el("dd", {}, said)])),
    el("details", {}, el("summary", {}, `Versions and environment (${versions.length})`),
      el("dl", { class: "lines" }, versions.map(([name, value]) => [el("dt", {}, name), el("dd", { class: "mono" }, value)]))));
}

// ---- All plans ------------------------------------------------------------------------------

function plansSection(page, rows) {
  const kinds = {};
  for (const row of rows) kinds[row.evidence] = (kinds[row.evidence] || 0) + 1;
  const said = Object.entries(kinds).map(([kind, count]) => `${count.toLocaleString("en")} ${kind}`).join(", ");
  return section("plans", "All plans",
    takeaway(rows.length ? `${Format.plural(rows.length, "plan")}: ${said}. Ranks compare figures of one kind; a column's name sorts by it.` : "No plan has got this far."),
    rows.length ? plansTable(rows, exportedWord(page)) : null);
}

// ---- Memory against time --------------------------------------------------------------------

function paretoFront(points) {
  const front = [];
  let best = Infinity;
  for (const point of [...points].sort((a, b) => a.memory - b.memory || a.time - b.time)) {
    if (point.time < best) { front.push(point); best = point.time; }
  }
  return front;
}

function scaleFor(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return low > 0 && high / low > 12 ? "log" : "linear";
}

function tradeoffSection(page, rows) {
  const able = rows.filter((row) => row.step_s && row.peak_bytes && ["measured", "compiled", "estimated"].includes(row.evidence));
  if (!able.length) return nothing(page, "Step time against memory", "", "no plan has both a time and a figure for memory");
  const limit = page.memory.limit_bytes;
  const reserve = page.memory.reserve_bytes || 0;
  const mostBytes = Math.max(...able.map((row) => row.peak_bytes));
  const isFar = limit && limit > 4 * mostBytes;  // drawn, it would squeeze all plans into a corner
  const time = Format.timeUnit(Math.max(...able.map((row) => row.step_s)));
  const memory = Format.memoryUnit(Math.max(...able.map((row) => row.peak_bytes)));
  // Predictions beside measured times: brought to the calibration line, or they would seem faster.
  const factors = (page.predictions && page.predictions.known === "measured" && page.predictions.factors) || {};
  const factorOf = { compiled: factors["from the compiled program"] || 1, estimated: factors.estimated || 1, measured: 1 };
  const kinds = ["compiled", "estimated"].filter((kind) => factorOf[kind] !== 1 && able.some((row) => row.evidence === kind));
  const moved = kinds.map((kind) => `${Format.factor(factorOf[kind])} what was ${kind === "compiled" ? "predicted from the compiled program" : "estimated"}`).join(", ");
  const points = able.map((row) => ({
    plan: row.plan, time: (row.step_s * factorOf[row.evidence]) / time.scale, memory: row.peak_bytes / memory.scale, evidence: row.evidence,
    timeText: Format.seconds(row.step_s * factorOf[row.evidence]) + (factorOf[row.evidence] === 1 ? "" : ` (${row.evidence} ${Format.seconds(row.step_s)}, on the calibration line)`), memoryText: Format.bytes(row.peak_bytes), bound: row.bound_by || "", row,
  }));
  // A front across kinds of evidence would compare seconds that cannot be compared.
  const strongest = ["measured", "compiled", "estimated"].find((kind) => points.some((one) => one.evidence === kind));
  const fitting = points.filter((one) => one.evidence === strongest && (!limit || one.memory * memory.scale <= limit - reserve));
  const front = paretoFront(fitting);
  const middle = (Math.min(...points.map((one) => one.memory)) + Math.max(...points.map((one) => one.memory))) / 2;
  const marked = points.filter((one) => one.row.plan === page.verdict.plan || one.row.is_baseline)
    .map((one) => ({ ...one, row: undefined, text: one.row.plan === page.verdict.plan ? exportedWord(page) : "script", align: one.memory > middle ? "right" : "left" }));
  const data = {
    plans: points.map((one) => ({ ...one, row: undefined })),
    front: front.map((one) => ({ memory: one.memory, time: one.time })),
    limit: limit && !isFar ? [{ at: limit / memory.scale, text: `limit ${Format.bytes(limit)}` }] : [],
    reserve: limit && reserve && !isFar ? [{ from: (limit - reserve) / memory.scale, to: limit / memory.scale }] : [],
    marked,
  };
  const said = front.length === 1
    ? `Among ${strongest} plans ${front[0].plan} is both the fastest and the smallest.`
    : `The dashed line joins the ${front.length} ${strongest} plans that no other beats in both: from ${front[0].memoryText} at ${front[0].timeText} to ${front[front.length - 1].memoryText} at ${front[front.length - 1].timeText}.`;
  const limitText = !limit ? "The limit of a device's memory is not known here."
    : isFar ? `A device has ${Format.bytes(limit)}, far beyond the right edge${reserve ? `, of which ${Format.bytes(reserve)} stay in reserve` : ""}.`
      : `The red line is the limit of a device, ${Format.bytes(limit)}${reserve ? `; the band before it, ${Format.bytes(reserve)}, stays in reserve` : ""}.`;
  return section("tradeoff", "Step time against memory",
    takeaway(fitting.length ? said : `No ${strongest} plan fits.`),
    el("p", { class: "note" }, `${limitText} Down and to the left is better; hold Ctrl and turn the wheel to zoom, drag to move.${moved ? ` Plans that were not measured stand where the calibration line puts them: ${moved}.` : ""}`),
    figure("memory", "Step time against memory of every plan", () => ({
      data,
      renderer: points.length > 1500 ? "canvas" : "svg",
      values: { time: time.unit, memory: memory.unit, timeScale: scaleFor(points.map((one) => one.time)), memoryScale: scaleFor(points.map((one) => one.memory)), evidenceRange: palette().evidence },
    })),
    dataTable("step time and memory", [["plan", "plan"], ["timeText", "step time"], ["memoryText", "memory"], ["evidence", "evidence"]], points));
}

// ---- Predictions ----------------------------------------------------------------------------

function predictionsSection(page) {
  const found = page.predictions;
  if (!found) return nothing(page, "Predicted against measured", "", "nothing was both predicted and measured, or replayed");
  const bases = Object.keys(found.factors);
  const most = Math.max(...found.rows.flatMap((row) => [row.predicted_s, row.known_s]));
  const least = Math.min(...found.rows.flatMap((row) => [row.predicted_s, row.known_s]));
  const time = Format.timeUnit(most);
  const names = shortNames([...new Set(found.rows.map((row) => row.plan))], 42);
  const points = found.rows.map((row) => ({
    ...row, x: row.predicted_s / time.scale, y: row.known_s / time.scale, residual: 100 * row.residual,
    label: names.get(row.plan), predictedText: Format.seconds(row.predicted_s), knownText: Format.seconds(row.known_s),
    residualText: Format.change(1 + row.residual),
  }));
  const ends = [least / 1.15 / time.scale, most * 1.15 / time.scale];
  const line = bases.flatMap((basis) => {
    const mine = points.filter((one) => one.basis === basis).map((one) => one.x);
    return [Math.min(...mine) / 1.15, Math.max(...mine) * 1.15].map((x) => ({ basis, x, y: x * found.factors[basis] }));
  });
  const worst = (basis) => Math.max(...points.filter((one) => one.basis === basis).map((one) => Math.abs(one.residual)));
  const said = bases.map((basis) => {
    const of = basis === "estimated" ? "estimated" : "predicted from the compiled program";
    const count = points.filter((one) => one.basis === basis).length;
    const factor = found.factors[basis];
    return `Of ${Format.plural(count, "plan")} the ${found.known} time is ${Format.factor(factor)} what was ${of}${count > 1 ? `; off that line by ${worst(basis).toFixed(0)} % at most` : ""}.`;
  }).join(" ");
  const scales = () => ({ domain: bases, range: bases.map((_, place) => palette().many[place]) });
  return section("predictions", `Predicted against ${found.known}`,
    takeaway(said),
    el("p", { class: "note" }, "Dotted: predicted exactly. Solid: the calibration line, one factor for all plans. What is off that line is what a ranking by predictions gets wrong.",
      found.belief ? ` ${found.belief}.` : ""),
    el("div", { class: "two" },
      el("div", {}, el("h3", {}, "Times"), figure("predictions", `Predicted against ${found.known} times`, () => ({
        data: { points, line, ideal: ends.map((x) => ({ x, y: x })) },
        values: { time: time.unit, known: found.known, ...scales() },
      }))),
      el("div", {}, el("h3", {}, "Residuals"), points.length < 2 * bases.length ? el("p", { class: "note" }, "One plan has no residual: the line goes through it.") : figure("residuals", "Distance of each plan from the calibration line", () => ({
        data: { points: points.slice(0, 40) }, values: { known: found.known, step: bases.length > 1 ? 12 : 20, ...scales() },
      })))),
    dataTable("predictions", [["plan", "plan"], ["basis", "predicted"], ["predictedText", "predicted time"], ["knownText", `${found.known} time`], ["residualText", "off the line by"]], points));
}

// ---- Funnel ---------------------------------------------------------------------------------

function funnelSection(page) {
  const { steps, lost, sentence } = page.funnel;
  const where = [...new Set(lost.map((one) => one.step))];
  const most = Math.max(1, ...steps.map((one) => one.count));
  const ticks = [0, 1, 10, 100, 1000, 10000, 100000].filter((one) => one <= most * 1.5);
  return section("funnel", "From all plans to one",
    takeaway(`${sentence}.`),
    el("div", { class: "two" },
      el("div", {}, el("h3", {}, "Plans that reached each step"), figure("funnel", "Plans that reached each step", () => ({ data: { steps }, values: { ticks } }))),
      el("div", {}, el("h3", {}, "What became of the others"),
        lost.length ? figure("lost", "Why plans fell out", () => ({
          data: { lost: lost.map((one) => ({ ...one, reason: one.reason })) },
          values: { domain: where, range: where.map((one, place) => ({ "not reached": palette().quiet, "ruled out": palette().many[0] })[one] || palette().many[1 + place]) },
        })) : el("p", { class: "note" }, "None fell out."))),
    dataTable("why plans fell out", [["reason", "why"], ["step", "where"], ["count", "plans"]], lost));
}

// ---- Where the time goes --------------------------------------------------------------------

function causesSection(page) {
  const rows = page.causes;
  if (!rows.length) return nothing(page, "Where the time goes", "explained");
  const totals = {};
  for (const row of rows) totals[row.order] = (totals[row.order] || 0) + row.seconds;
  const time = Format.timeUnit(Math.max(...Object.values(totals)));
  const causes = sortedCauses(rows.map((row) => row.cause));
  const names = shortNames([...new Set(rows.map((row) => row.plan))], 44);
  const data = rows.map((row) => ({
    ...row, label: `${row.order}. ${names.get(row.plan)}`, value: row.seconds / time.scale, place: causes.indexOf(row.cause),
    text: Format.seconds(row.seconds), share: Format.percent(row.seconds / totals[row.order]),
  }));
  const first = data.filter((row) => row.order === 1).sort((a, b) => b.value - a.value)[0];
  const isMixed = new Set(rows.map((row) => row.evidence)).size > 1;
  return section("causes", "Where the time goes",
    takeaway(first ? `${first.share} of the step of ${first.plan} is ${causeWords(first.cause)}.` : ""),
    el("p", { class: "note" }, `Predicted seconds${isMixed ? " (replayed where a plan was compiled for its target, else estimated)" : rows[0].evidence === "compiled" ? " by the replay of the compiled program" : " by the estimate"}; communication counts only as far as the step waits for it. In the order of the ranking.`),
    figure("causes", "Step time of each plan by cause", () => ({ data: { causes: data }, values: { time: time.unit, domain: causes, range: causeColours(causes) } })),
    dataTable("causes", [["plan", "plan"], ["cause", "cause"], ["text", "time"], ["share", "of the step"], ["evidence", "evidence"]], data));
}

function causeWords(cause) {
  const [kind, ...axes] = cause.split(" ");
  const words = { compute: "compute", memory: "device memory traffic", latency: "latency", bubble: "the bubble of the pipeline", host: "transfers to the host" };
  if (kind === "ici") return `communication over ${axes.join(" ")} inside a granule (ICI)`;
  if (kind === "dcn") return `communication over ${axes.join(" ")} between granules (DCN)`;
  return words[kind] || cause;
}

function planChoices(list) {
  return list.map((one, place) => [place, `${place + 1}. ${one.plan}`]);
}

function collectivesSection(page) {
  const list = page.explained;
  if (!list.length) return null;
  const holder = el("div");
  function show(place) {
    const one = list[Number(place)];
    const total = one.collectives.reduce((sum, each) => sum + each.seconds, 0);
    if (!one.collectives.length) {
      holder.replaceChildren(el("p", { class: "note" }, `${one.plan} has no collectives.`));
      return;
    }
    const lines = {};
    for (const each of one.collectives) {
      const source = each.source || "unknown line";
      lines[source] = (lines[source] || 0) + each.seconds;
    }
    const top = Object.entries(lines).sort((a, b) => b[1] - a[1]).slice(0, 14).map(([source]) => source);
    const time = Format.timeUnit(Math.max(...Object.values(lines)));
    const data = one.collectives.filter((each) => top.includes(each.source || "unknown line")).map((each) => ({
      kind: each.kind, axes: each.axes.join("+") || "no axes", source: each.source || "unknown line", order: top.indexOf(each.source || "unknown line"),
      region: each.region, runs: Number(each.runs.toPrecision(4)), payload: Format.bytes(each.device_bytes), value: each.seconds / time.scale, text: Format.seconds(each.seconds),
    }));
    const axes = [...new Set(data.map((each) => each.axes))].sort();
    const other = Object.keys(lines).length - top.length;
    const [costliest, costs] = Object.entries(lines).sort((a, b) => b[1] - a[1])[0];
    const left = one.collectives_left_out.count ? ` ${one.collectives_left_out.count} smaller collectives are not listed.` : "";
    holder.replaceChildren(
      takeaway(`${costliest} costs most: ${Format.seconds(costs)} of ${Format.seconds(total)} of collectives, each as if nothing ran beside it.${other > 0 ? ` ${other} cheaper lines are not drawn.` : ""}${left}`),
      figure("collectives", `Collectives of ${one.plan}`, () => ({ data: { collectives: data }, values: { time: time.unit, domain: axes, range: axes.map((_, at) => palette().many[at % palette().many.length]) } })),
      dataTable("collectives", [["kind", "collective"], ["axes", "over"], ["source", "at"], ["region", "in"], ["runs", "runs"], ["payload", "bytes of one run on a device"], ["text", "time alone"]], data));
  }
  const element = section("collectives", "Collectives by axis and source line",
    el("div", { class: "bar" }, choice("plan", planChoices(list), 0, show)), holder);
  show(0);
  return element;
}

function compareSection(page) {
  const list = page.explained;
  if (list.length < 2) return null;
  const state = { a: 0, b: 1 };
  const holder = el("div");
  function show() {
    const [one, other] = [list[state.a], list[state.b]];
    if (one === other) {
      holder.replaceChildren(el("p", { class: "note" }, "Choose two different plans."));
      return;
    }
    const key = state.a < state.b ? `${state.a},${state.b}` : `${state.b},${state.a}`;
    const seconds = (side, cause) => (side.causes.find((each) => each.cause === cause) || { seconds: 0 }).seconds;
    const causes = sortedCauses([...one.causes, ...other.causes].map((each) => each.cause));
    const time = Format.timeUnit(Math.max(...causes.flatMap((cause) => [seconds(one, cause), seconds(other, cause)])));
    const data = causes.flatMap((cause, order) => [["A", one], ["B", other]].map(([side, each]) => ({
      side, plan: each.plan, cause, order, value: seconds(each, cause) / time.scale, text: Format.seconds(seconds(each, cause)),
    })));
    const figures = [
      ["step, estimated", (each) => Format.seconds(each.step_s.estimated)],
      ["step, from the compiled program", (each) => Format.seconds(each.step_s.compiled)],
      ["step, measured", (each) => Format.seconds(each.step_s.measured)],
      ...causes.map((cause) => [cause, (each) => (seconds(each, cause) ? Format.seconds(seconds(each, cause)) : "-")]),
      ["memory, estimated", (each) => Format.bytes(each.memory.estimated_bytes)],
      ["memory, by the compiler", (each) => Format.bytes(each.memory.compiled_bytes)],
      ["FLOPs a device", (each) => each.flops.toExponential(2)],
      ["memory traffic a device", (each) => Format.bytes(each.memory_traffic_bytes)],
    ].filter(([, read]) => read(one) || read(other));
    holder.replaceChildren(
      takeaway(page.verdicts[key] || ""),
      el("div", { class: "two" },
        figure("pair", `Causes of ${one.plan} and ${other.plan}`, () => ({ data: { pair: data }, values: { time: time.unit, range: [palette().many[0], palette().many[1]] } })),
        el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Two plans in figures" }, el("table", { id: "pair-table" },
          el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "predicted"), el("th", { scope: "col", class: "right" }, "A"), el("th", { scope: "col", class: "right" }, "B"))),
          el("tbody", {}, figures.map(([name, read]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "right" }, read(one) || "-"), el("td", { class: "right" }, read(other) || "-"))))))),
      el("p", { class: "note" }, `A: ${one.plan}. ${one.why}.`),
      el("p", { class: "note" }, `B: ${other.plan}. ${other.why}.`));
  }
  const element = section("compare", "Two plans side by side",
    el("div", { class: "bar" },
      choice("A", planChoices(list), 0, (value) => { state.a = Number(value); show(); }),
      choice("B", planChoices(list), 1, (value) => { state.b = Number(value); show(); })),
    holder);
  show();
  return element;
}

// ---- Timelines ------------------------------------------------------------------------------

function timelineSection(page) {
  const list = page.timelines;
  if (!list.length) {
    return nothing(page, "The schedule in time", "timelines");
  }
  const holder = el("div");
  function show(place) {
    const one = list[Number(place)];
    const time = Format.timeUnit(one.step_s);
    const end = one.step_s / time.scale;
    const slices = one.slices.map(([track, start, seconds, name, cause, kind, source]) => ({
      track, start: start / time.scale, end: (start + seconds) / time.scale, name, source,
      cause: cause || kind, kind: { work: "work", wait: "wait", transfer: "transfer", repeats: "further trips of a loop" }[kind] || kind, startText: Format.seconds(start), text: Format.seconds(seconds),
    }));
    const causes = sortedCauses(slices.map((each) => each.cause));
    const values = () => ({ time: time.unit, tracks: one.tracks, domain: causes, range: causeColours(causes), end });
    const span = { from: 0, to: end };
    const said = el("span", { role: "status", class: "note", id: "timeline-span" });
    let detail = null;
    function zoom(from, to) {
      const width = Math.min(Math.max(to - from, end / 5000), end);
      span.from = Math.min(Math.max(from, 0), end - width);
      span.to = span.from + width;
      said.textContent = `${span.from > 0 ? Format.seconds(span.from * time.scale) : "0"} to ${Format.seconds(span.to * time.scale)} of ${Format.seconds(one.step_s)}`;
      detail?.signal("from", span.from).signal("to", span.to).runAsync();
    }
    const by = (share) => () => {
      const [middle, half] = [(span.from + span.to) / 2, ((span.to - span.from) / 2) * share];
      zoom(middle - half, middle + half);
    };
    const move = (share) => () => zoom(span.from + share * (span.to - span.from), span.to + share * (span.to - span.from));
    const button = (text, act, label) => el("button", { type: "button", "aria-label": label, on: { click: act } }, text);
    const renderer = slices.length > 600 ? "canvas" : "svg";
    const words = one.kind === "replay"
      ? "the schedule of the compiled program, played on the links of the target"
      : "the schedule of the pipeline, each program as long as its FLOPs and bytes say";
    const idle = slices.filter((each) => each.cause === "bubble").reduce((sum, each) => sum + each.end - each.start, 0);
    const ranks = one.tracks.filter((track) => track.startsWith("rank ")).length;
    const bubble = ranks && idle ? ` Ranks wait for ${Format.percent(idle / (end * ranks))} of it.` : "";
    holder.replaceChildren(
      takeaway(`One step of ${one.plan} takes ${Format.seconds(one.step_s)}: ${words}.${bubble}`),
      el("p", { class: "note" }, ranks ? "A row is a rank, or a pair of ranks that one sends to the other." : "The first row is what the cores do or wait for; the others are links by direction, and networks, while something is sent on them."),
      one.left_out ? el("p", { class: "note" }, `The ${one.left_out.toLocaleString("en")} shortest pieces are not drawn.`) : "",
      el("div", { class: "bar" }, button("Zoom in", by(0.5)), button("Zoom out", by(2)), button("\u2190", move(-0.5), "Earlier"), button("\u2192", move(0.5), "Later"), button("Whole step", () => zoom(0, end)), said),
      figure("timeline", `Timeline of ${one.plan}`, () => ({ data: { slices }, values: values(), renderer }), { after: (view) => { detail = view; zoom(span.from, span.to); } }),
      el("div", { class: "noprint" }, figure("overview", "The whole step; drag over a part of it", () => ({ data: { slices }, values: values(), renderer }), {
        after: (view) => view.addSignalListener("brush_x", (_, pixels) => {
          if (!pixels || pixels.length < 2 || pixels[0] === pixels[1]) return;
          const [from, to] = pixels.map((pixel) => view.scale("x").invert(pixel));
          zoom(Math.min(from, to), Math.max(from, to));
        }),
      })),
      dataTable("the timeline", [["track", "on"], ["startText", "begins at"], ["text", "takes"], ["name", "what"], ["cause", "cause"], ["source", "at"]], slices));
    zoom(0, end);
  }
  const element = section("timeline", "The schedule in time",
    el("div", { class: "bar" }, choice("plan", planChoices(list), 0, show)), holder, page.left_out.timelines ? el("p", { class: "note" }, `Of other plans: ${page.left_out.timelines}.`) : null);
  show(0);
  return element;
}

// ---- Memory over the program ----------------------------------------------------------------

function memorySection(page) {
  const held = page.timelines.filter((one) => one.held.length);
  const points = page.explained.filter((one) => one.points.length);
  if (!held.length && !points.length) return null;
  const list = [...held.map((one) => ["held", one]), ...points.map((one) => ["points", one])];
  const holder = el("div");
  function show(place) {
    const [kind, one] = list[Number(place)];
    if (kind === "held") {
      const time = Format.timeUnit(one.step_s);
      const most = Math.max(...one.held.map((each) => each.bytes), 1);
      const memory = Format.memoryUnit(most);
      // What is freed and taken at the same moment is one change.
      const moments = one.held.filter((each, place) => {
        const next = one.held[place + 1];
        return !next || next.rank !== each.rank || next.at_s !== each.at_s;
      });
      const data = moments.map((each) => ({ rank: `rank ${each.rank}`, at: each.at_s / time.scale, value: each.bytes / memory.scale, text: Format.bytes(each.bytes), atText: Format.seconds(each.at_s) }));
      const worst = one.held.reduce((a, b) => (b.bytes > a.bytes ? b : a));
      holder.replaceChildren(
        takeaway(`Rank ${worst.rank} holds most: ${Format.bytes(worst.bytes)} of activations on one device, first at ${Format.seconds(worst.at_s)} of the step.`),
        figure("held", `Activations of ${one.plan}`, () => ({ data: { held: data }, values: { time: time.unit, memory: memory.unit } })),
        dataTable("activations", [["rank", "rank"], ["atText", "from"], ["text", "held"]], data));
      return;
    }
    const lasting = one.memory.argument_bytes + one.memory.output_bytes - one.memory.alias_bytes;
    const most = Math.max(...one.points.map((each) => each.bytes)) + lasting;
    const limit = page.memory.limit_bytes;
    const memory = Format.memoryUnit(most);
    const data = one.points.flatMap((each, at) => [
      { place: at, part: "arguments and results", order: 0, value: lasting / memory.scale, text: Format.bytes(lasting), source: each.source || "unknown line" },
      { place: at, part: "temporaries", order: 1, value: each.bytes / memory.scale, text: Format.bytes(each.bytes), source: each.source || "unknown line" },
    ]);
    const worst = one.points.reduce((a, b) => (b.bytes > a.bytes ? b : a));
    const near = limit && limit < 3 * most ? [{ at: limit / memory.scale }] : [];
    holder.replaceChildren(
      takeaway(`The peak of ${one.plan} is estimated at ${worst.source || "an unknown line"}: ${Format.bytes(worst.bytes)} of temporaries beside ${Format.bytes(lasting)} of arguments and results.${limit ? ` A device has ${Format.bytes(limit)}.` : ""}`),
      figure("points", `Memory of ${one.plan}`, () => ({ data: { points: data, limit: near }, values: { memory: memory.unit, range: [palette().quiet, palette().memory] } })),
      dataTable("memory", [["source", "at"], ["part", "part"], ["text", "bytes"]], data));
  }
  const element = section("memory", "Memory over the program",
    el("p", { class: "note" }, held.length ? "What the ranks of a pipeline hold over a step; of single programs, the points where memory may peak." : "Of a program only the points are kept at which memory may peak on some mesh; between them less is held."),
    el("div", { class: "bar" }, choice("plan", list.map(([kind, one], place) => [place, `${one.plan}${held.length && points.length ? (kind === "held" ? " (ranks)" : " (program)") : ""}`]), 0, show)), holder);
  show(0);
  return element;
}

// ---- The mesh on its devices ----------------------------------------------------------------

function coordinatesOf(device, axes) {
  const found = [];
  let rest = device;
  for (const axis of [...axes].reverse()) { found.unshift(rest % axis.size); rest = Math.floor(rest / axis.size); }
  return found;
}

function placementSection(page) {
  const list = page.placements;
  if (!list.length) return nothing(page, "The mesh on its devices", "placements");
  const wiring = page.wiring;
  const isTorus = wiring.kind === "torus";
  const [granuleWord] = isTorus ? ["slice"] : wiring.kind === "switch" ? ["node"] : ["host"];
  const holder = el("div");
  const axisHolder = el("span");
  const state = { plan: 0, axis: 0 };
  function show() {
    const one = list[state.plan];
    const active = one.axes.map((axis, place) => ({ ...axis, place })).filter((axis) => axis.size > 1);
    const axis = active[Math.min(state.axis, Math.max(active.length - 1, 0))];
    axisHolder.replaceChildren(active.length ? choice("axis", active.map((each, place) => [place, `${each.name} (${each.size})`]), active.indexOf(axis), (value) => { state.axis = Number(value); show(); }) : "");
    const width = holder.clientWidth || document.getElementById("page").clientWidth - 40;
    const dimensions = wiring.torus.length;
    const origin = coordinatesOf(0, one.axes);
    const data = one.devices.map((device, place) => {
      const [x, y, z, core] = one.place[place];
      const at = coordinatesOf(device, one.axes);
      const along = axis ? at[axis.place] : 0;
      const inGroup = at.every((value, number) => (axis && number === axis.place) || value === origin[number]);
      const panel = [wiring.granules > 1 ? `${granuleWord} ${one.granule[place]}` : "", dimensions > 2 ? `z = ${z}` : ""].filter(Boolean).join(", ");
      const cell = isTorus
        ? { x: wiring.devices_per_chip > 1 ? x * wiring.devices_per_chip + core : x, y }
        : { x: core % 8, y: Math.floor(core / 8) };
      return {
        device, ...cell, panel: panel || (isTorus ? `${wiring.torus.join(" x ")} chips` : `${wiring.granule_devices} devices`), along,
        coordinates: at.map((value, number) => (one.axes[number].size > 1 ? `${one.axes[number].name} ${value}` : "")).filter(Boolean).join(", "),
        where: isTorus ? `${granuleWord} ${one.granule[place]}, chip ${[x, y, z].slice(0, dimensions).join(",")}${wiring.devices_per_chip > 1 ? `, core ${core}` : ""}` : `${granuleWord} ${one.granule[place]}, number ${core}`,
        group: inGroup ? "of device 0" : "another",
      };
    });
    const across = new Set(data.map((each) => each.x)).size;
    const down = new Set(data.map((each) => each.y)).size;
    const panels = new Set(data.map((each) => each.panel)).size;
    const cell = Math.max(Math.min(40, Math.floor((Math.min(width, 1100) - 70) / across) - 2), across > 24 ? 6 : 14);
    const columns = Math.max(1, Math.min(panels, Math.floor(width / (across * cell + 76))));
    const most = axis ? axis.size - 1 : 1;
    for (const each of data) {
      each.showText = cell >= 18 && axis !== undefined;
      each.ink = each.along / most > 0.55 ? "#14171b" : "#ffffff";
    }
    const group = data.filter((each) => each.group === "of device 0");
    const granules = new Set(group.map((each) => one.granule[one.devices.indexOf(each.device)])).size;
    const drawn = one.devices.length < page.device_count ? ` Drawn are ${one.devices.length.toLocaleString("en")} of ${page.device_count.toLocaleString("en")} devices.` : "";
    const said = axis
      ? `A group along ${axis.name} has ${axis.size} devices${granules > 1 ? ` in ${granules} ${granuleWord}s` : ` in one ${granuleWord}`}; outlined is the one of device 0. Colours count the place along ${axis.name}.${drawn}`
      : `The mesh has one device along every axis.${drawn}`;
    holder.replaceChildren(
      takeaway(said),
      figure("placement", `Devices of ${one.plan} along ${axis ? axis.name : "no axis"}`, () => ({
        data: { devices: data },
        renderer: data.length > 1024 ? "canvas" : "svg",
        values: {
          columns, width: across * cell, height: down * cell,
          xTitle: isTorus ? (wiring.devices_per_chip > 1 ? "x, cores apart" : "x") : `device in its ${granuleWord}`, yTitle: isTorus ? "y" : "",
          // Vega makes part of an expression of it: nothing but what a name of an axis may have.
          axisTitle: axis ? `place along ${axis.name.replace(/\W/g, "")}` : "",
        },
      }), { wide: true }),
      dataTable("devices", [["device", "device"], ["coordinates", "mesh"], ["where", "place"]], data));
  }
  const links = isTorus
    ? `${Format.plural(wiring.granules, granuleWord)} of ${wiring.torus.join(" x ")} chips; ${wiring.wraps.map((wraps, place) => `${"xyz"[place]} ${wraps ? "wraps around" : "does not wrap"}`).join(", ")}.`
    : wiring.kind === "switch" ? `${Format.plural(wiring.granules, granuleWord)} of ${wiring.granule_devices} devices, joined by a switch inside and by a network between.`
      : `${Format.plural(wiring.granule_devices, "device")} that share the memory of one host.`;
  const element = section("placement", "The mesh on its devices",
    el("p", { class: "note" }, links),
    el("div", { class: "bar" }, choice("plan", planChoices(list), 0, (value) => { state.plan = Number(value); state.axis = 0; show(); }), axisHolder),
    holder, page.left_out.placements ? el("p", { class: "note" }, `Of other plans: ${page.left_out.placements}.`) : null);
  queueMicrotask(show);
  return element;
}

// ---- Rounds ---------------------------------------------------------------------------------

function drift(rows) {
  // The median of the first and the last third of all rounds, each plan against its own median.
  const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
  const own = {};
  for (const row of rows) (own[row.plan] = own[row.plan] || []).push(row.step_s);
  const relative = rows.map((row) => ({ number: row.number, value: row.step_s / median(own[row.plan]) }));
  const numbers = relative.map((row) => row.number);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  if (high - low < 5) return null;
  const part = (from, to) => median(relative.filter((row) => row.number >= low + from * (high - low) && row.number <= low + to * (high - low)).map((row) => row.value));
  return part(2 / 3, 1) / part(0, 1 / 3) - 1;
}

function roundsSection(page) {
  const rows = page.rounds;
  if (!rows.length) return nothing(page, "Rounds of the race", "rounds");
  const time = Format.timeUnit(Math.max(...rows.map((row) => row.step_s)));
  const plans = [...new Set(rows.map((row) => row.plan))];
  const exported = page.verdict.plan;
  plans.sort((a, b) => (b === exported) - (a === exported));
  const data = rows.map((row) => ({ ...row, kind: row.where.startsWith("race") ? "race" : row.where, value: row.step_s / time.scale, text: Format.seconds(row.step_s) }));
  const shift = drift(rows);
  const races = new Set(rows.filter((row) => row.where.startsWith("race")).map((row) => row.where)).size;
  const said = [`${Format.plural(rows.length, "time")} of ${Format.plural(plans.length, "plan")} in ${Format.plural(races, "race")} and the fresh processes after.`];
  if (shift !== null) said.push(Math.abs(shift) < 0.02 ? "No drift: the last third of the rounds is as fast as the first." : `Drift: the last third of the rounds took ${Format.change(1 + shift)} against the first, all plans alike; plans are compared within rounds, which cancels it.`);
  return section("rounds", "Rounds of the race",
    takeaway(said.join(" ")),
    el("p", { class: "note" }, "Plans take turns in every round, so noise and drift hit all alike. Click a name below the chart to see that plan alone."),
    figure("rounds", "Step times round by round", () => ({
      data: { rounds: data },
      values: { time: time.unit, domain: plans, range: plans.map((_, place) => palette().many[place % palette().many.length]), columns: Math.max(1, Math.floor((document.getElementById("page").clientWidth - 40) / 360)) },
    })),
    dataTable("rounds", [["number", "round"], ["where", "where"], ["plan", "plan"], ["text", "step time"]], data));
}
