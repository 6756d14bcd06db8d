// Charts: a specification (data, from `charts/*.json`), its data sets, and values for its {names}.
// They are drawn one after the other when the browser is idle, so that the text is there first.
const PALETTES = {
  light: {
    main: "#1f5fbf", quiet: "#6b7280", warn: "#c77700", bad: "#b3261e", strong: "#111827", paper: "#ffffff",
    ink: "#1b1f24", soft: "#4b5563", line: "#d5dae1",
    evidence: ["#136f3c", "#1f5fbf", "#b26a00"],
    many: ["#1f5fbf", "#c2410c", "#0f766e", "#a21caf", "#a16207", "#475569", "#be123c", "#4d7c0f", "#6d28d9", "#0e7490", "#57534e", "#db2777"],
    compute: "#2f6fd0", memory: "#159a84", latency: "#8a94a3", bubble: "#c4cad3", host: "#8b5cf6", other: "#5b6472",
    ici: ["#e07b00", "#f2a93b", "#b85c00", "#f7c978", "#8f4700"], dcn: ["#c0306b", "#e36a9b", "#8f1d4c", "#f0a3c2"],
  },
  dark: {
    main: "#7db3ff", quiet: "#98a2b0", warn: "#f0b866", bad: "#ff9a90", strong: "#ffffff", paper: "#14171b",
    ink: "#e7eaee", soft: "#aab3bf", line: "#363d47",
    evidence: ["#6fd39a", "#7db3ff", "#f0b866"],
    many: ["#7db3ff", "#fb923c", "#2dd4bf", "#e879f9", "#facc15", "#cbd5e1", "#fb7185", "#a3e635", "#a78bfa", "#22d3ee", "#d6d3d1", "#f9a8d4"],
    compute: "#5b9bf5", memory: "#34c3aa", latency: "#8e99a8", bubble: "#4d5663", host: "#a78bfa", other: "#7b8694",
    ici: ["#f59e2b", "#fbc46d", "#c87414", "#fde0ad", "#9b5a10"], dcn: ["#ec5f95", "#f59ec0", "#c23b71", "#f9c9dc"],
  },
};

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function palette() {
  return PALETTES[isDark() ? "dark" : "light"];
}

// Causes keep their colours on the whole page: compute, memory, then links inside and between granules.
function causeColours(causes) {
  const colours = palette();
  const used = { ici: 0, dcn: 0, network: 0 };
  return causes.map((cause) => {
    const kind = cause.split(" ")[0];
    if (kind === "ici" || kind === "network") return colours.ici[used.ici++ % colours.ici.length];
    if (kind === "dcn") return colours.dcn[used.dcn++ % colours.dcn.length];
    return colours[kind] || (kind.startsWith("wait") || kind === "pipeline" ? colours.bubble : colours.other);
  });
}

const CAUSE_ORDER = ["compute", "memory", "ici", "network", "dcn", "host", "latency", "bubble"];
function sortedCauses(causes) {
  const place = (cause) => {
    const found = CAUSE_ORDER.indexOf(cause.split(" ")[0]);
    return found < 0 ? CAUSE_ORDER.length : found;
  };
  return [...new Set(causes)].sort((a, b) => place(a) - place(b) || (a < b ? -1 : 1));
}

function filled(part, values) {
  if (typeof part === "string") {
    const whole = part.match(/^\{(\w+)\}$/);
    if (whole && whole[1] in values) return values[whole[1]];
    return part.replace(/\{(\w+)\}/g, (all, name) => (name in values ? values[name] : all));
  }
  if (Array.isArray(part)) return part.map((one) => filled(one, values));
  if (part && typeof part === "object") {
    return Object.fromEntries(Object.entries(part).map(([key, value]) => [key, filled(value, values)]));
  }
  return part;
}

function holderTicks(width) {
  return Math.max(3, Math.min(8, Math.floor(width / 90)));
}

function chartConfig(width) {
  const colours = palette();
  const font = getComputedStyle(document.body).fontFamily;
  return {
    background: "transparent",
    font,
    view: { stroke: null },
    axis: {
      labelColor: colours.soft, titleColor: colours.soft, domainColor: colours.line, tickColor: colours.line,
      gridColor: colours.line, gridOpacity: 0.7, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal",
      labelPadding: 5,
    },
    axisY: { titlePadding: 10 },
    axisBand: { grid: false },
    axisQuantitative: { tickCount: holderTicks(width) },
    legend: { labelColor: colours.ink, titleColor: colours.soft, labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal", labelLimit: 280, symbolSize: 90 },
    header: { labelColor: colours.ink, titleColor: colours.soft, labelFontSize: 12 },
    text: { color: colours.ink, fontSize: 12 },
    bar: { color: colours.main },
    range: { category: colours.many },
  };
}

// What is put into a specification: Vega makes expressions of it, in which these two end a line.
const oneLine = (value) => typeof value === "string" ? value.replace(/[\u2028\u2029]/g, " ")
  : Array.isArray(value) ? value.map(oneLine) : value;

const Charts = {
  specifications: {},
  drawn: new Map(),  // element -> {name, make, view}
  queue: [],
  running: false,

  // `make()` gives {data: {name: rows}, values: {name: value}}; it is asked again when the theme changes.
  add(holder, name, make, after) {
    Charts.drawn.set(holder, { name, make, after, view: null });
    Charts.queue.push(holder);
    Charts.work();
  },
  async work() {
    if (Charts.running || !window.vegaEmbed) return;  // its scripts follow this one
    Charts.running = true;
    while (Charts.queue.length) {
      await new Promise((done) => (window.requestIdleCallback || setTimeout)(done, { timeout: 300 }));
      const holder = Charts.queue.shift();
      if (!holder.isConnected) continue;
      try {
        await Charts.draw(holder);
      } catch (error) {
        // One chart less must not cost the others; its figures are below it.
        console.error(error);
        holder.replaceChildren(el("p", { class: "note" }, `This chart cannot be drawn: ${error.message}`));
      }
    }
    Charts.running = false;
    document.documentElement.dataset.charts = "done";
  },
  async draw(holder) {
    const chart = Charts.drawn.get(holder);
    const { data, values: given, renderer } = chart.make();
    const values = Object.fromEntries(Object.entries(given).map(([key, value]) => [key, oneLine(value)]));
    const colours = palette();
    const width = holder.clientWidth || 600;
    const labelLimit = Math.round(Math.min(330, width * 0.36));
    const columns = Math.max(2, Math.min(8, Math.floor((width - labelLimit) / 130)));
    const spec = filled(Charts.specifications[chart.name], { ...colours, labelLimit, columns, ...values });
    spec.datasets = data;
    // Nothing to draw gives Vega no scale to draw it on.
    if (spec.layer) spec.layer = spec.layer.filter((layer) => !layer.data || data[layer.data.name].length);
    chart.view?.finalize();
    const embedded = await vegaEmbed(holder, spec, {
      logLevel: vega.Error, ast: true, renderer: renderer || "svg", config: chartConfig(width), tooltip: { theme: "custom" },
      actions: { export: { svg: true, png: true }, source: false, compiled: false, editor: false },
      downloadFileName: `automesh-${chart.name}`, loader: { http: { credentials: "omit" } },
    });
    chart.view = embedded.view;
    const summary = holder.querySelector("details > summary");
    if (summary) summary.setAttribute("aria-label", "Save this chart as a picture");
    // Marks that have no name of their own (a brush) are nothing to be read aloud.
    for (const mark of holder.querySelectorAll("g[role=graphics-symbol]:not([aria-label])")) mark.setAttribute("aria-hidden", "true");
    chart.after?.(embedded.view);
  },
  async redraw() {
    document.documentElement.dataset.charts = "drawing";
    for (const holder of Charts.drawn.keys()) {
      if (!holder.isConnected) Charts.drawn.delete(holder);
      else if (!Charts.queue.includes(holder)) Charts.queue.push(holder);
    }
    await Charts.work();
  },
};

// A place for a chart with its sentence above and its figures below.
function figure(name, label, make, options = {}) {
  const holder = el("div", { class: `chart ${options.wide ? "wide" : ""}`, role: "group", "aria-label": label });
  queueMicrotask(() => Charts.add(holder, name, make, options.after));
  return holder;
}
