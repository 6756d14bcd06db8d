// Builds the page from its document. A server that embeds the page calls `automeshPage.render`.
function renderPage(page, specifications, root) {
  Charts.specifications = specifications;
  const rows = plansOf(page);
  const first = [[ruleSection, "Rule"], [plansSection, "Plans"]];
  const later = [
    [tradeoffSection, "Memory"], [causesSection, "Time"], [compareSection, "Compare"], [collectivesSection, "Collectives"],
    [timelineSection, "Schedule"], [memorySection, "Program memory"], [placementSection, "Devices"], [roundsSection, "Rounds"],
    [predictionsSection, "Predictions"], [funnelSection, "Funnel"], [evidenceSection, "Evidence"],
  ];
  const links = el("ul");
  const empty = [];
  const main = el("main", {}, verdictSection(page), el("nav", { "aria-label": "Parts of this page" }, links));
  const add = (parts) => {
    for (const [make, name] of parts) {
      const element = make(page, rows);
      if (!(element instanceof Node)) {
        if (element) empty.push(element);
        continue;
      }
      main.append(element);
      links.append(el("li", {}, el("a", { href: `#${element.id}` }, name)));
    }
  };
  const theme = el("button", { type: "button", class: "noprint", id: "theme", on: { click: () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    Charts.redraw();
  } } }, "Light or dark");
  const made = page.made ? `, ${page.made.slice(0, 10)}` : "";
  root.replaceChildren(
    el("header", {}, el("h1", {}, `${page.title}${made}`), theme),
    main,
    el("footer", {},
      el("p", {}, `Made by automesh ${page.versions.automesh || ""} from the study of ${page.workload} on ${page.target}. This file loads nothing from anywhere; it may be sent and kept as it is.`),
      el("p", {}, "Charts: Vega, Vega-Lite and Vega-Embed (BSD-3-Clause, University of Washington Interactive Data Lab), with parts of D3 (ISC, Mike Bostock)."),
      el("details", {}, el("summary", {}, "Licenses"), el("pre", { tabindex: 0 }, document.getElementById("licenses")?.textContent || ""))));
  add(first);
  // The answer and the table are painted before the rest is made.
  requestAnimationFrame(() => setTimeout(() => {
    add(later);
    if (empty.length) main.append(leftOutSection(empty));
    document.documentElement.dataset.ready = "true";
  }));
}

function readJson(id) {
  return JSON.parse(document.getElementById(id).textContent);
}

window.automeshPage = { render: renderPage, Format };
if (document.getElementById("document")) {
  renderPage(readJson("document"), readJson("charts"), document.getElementById("page"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Charts.redraw());
  addEventListener("load", () => Charts.work());
  let width = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return;  // a phone's address bar changes the height alone
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(() => Charts.redraw(), 250);
  });
}
