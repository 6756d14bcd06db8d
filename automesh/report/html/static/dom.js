// Elements are made from names, attributes and texts; nothing is ever read as HTML.
function el(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

function choice(label, options, value, act) {
  const select = el("select", { "aria-label": label, on: { change: () => act(select.value) } },
    options.map(([key, text]) => el("option", { value: key, selected: String(key) === String(value) }, text)));
  return el("label", {}, `${label} `, select);
}

// The figures of a chart as a table, closed until it is asked for.
function dataTable(caption, columns, rows) {
  const details = el("details", { class: "data" }, el("summary", {}, `The figures: ${caption}`));
  details.addEventListener("toggle", () => {
    if (!details.open || details.childElementCount > 1) return;
    const shown = rows.slice(0, 500);
    details.append(el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
      el("table", {},
        el("thead", {}, el("tr", {}, columns.map(([, head]) => el("th", { scope: "col" }, head)))),
        el("tbody", {}, shown.map((row) => el("tr", {}, columns.map(([key]) => el("td", {}, row[key] ?? ""))))))));
    if (rows.length > shown.length) details.append(el("p", { class: "note" }, `and ${rows.length - shown.length} more`));
  }, {});
  return details;
}

function copyButton(text, what) {
  const button = el("button", { type: "button" }, `Copy ${what}`);
  const said = el("span", { role: "status", class: "note" });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      said.textContent = "copied";
    } catch {
      // A page from a file may be forbidden to use the clipboard: the text is selected instead.
      const area = button.closest("section, div.rule")?.querySelector("pre");
      if (area) getSelection().selectAllChildren(area);
      said.textContent = "selected: press Ctrl+C";
    }
  });
  return [button, said];
}
