// The pages of the service. What studies say is only ever set as text; the report of a study, which
// holds what others wrote, is shown in a frame that is of no origin. `el` and `Format` are those of
// the report.
"use strict";

const main = document.getElementById("main");
const KEY = "automesh-token";
const ENDED = ["found", "nothing", "failed", "cancelled"];

class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(KEY) || ""}`, ...options.headers };
  const reply = await fetch(path, { ...options, headers, cache: "no-store" });
  if (reply.ok) return reply;
  const said = await reply.json().catch(() => ({}));
  throw new Refused(reply.status, said.detail || `the service answered ${reply.status}`);
}

const json = async (path, options) => (await ask(path, options)).json();
const inPath = (name) => encodeURIComponent(name);

const day = (value) => (value ? new Date(value * 1000).toISOString().slice(0, 16).replace("T", " ") : "");

// Logging in

function login(problem) {
  const field = el("input", { type: "password", id: "token", autocomplete: "off", required: true, size: 40 });
  const send = (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, field.value.trim());
    start();
  };
  main.replaceChildren(
    el("h1", {}, "Who are you?"),
    el("p", {}, "Everything here needs a token. `automesh serve` prints the address with one when it starts; for others, `automesh token NAME` makes one."),
    el("form", { on: { submit: send } }, el("label", { for: "token" }, "Token"), field, el("button", {}, "Continue")),
    el("p", { class: "problem", role: "alert" }, problem || ""));
  field.focus();
}

// Lists

async function listStudies() {
  const query = new URLSearchParams(location.search);
  const page = Number(query.get("page") || 1);
  const words = el("input", { type: "search", id: "words", value: query.get("query") || "" });
  const state = el("select", { id: "state" },
    ["", "running", "ended", "interrupted", "stopped", "unreadable"].map((one) =>
      el("option", { value: one, selected: one === (query.get("state") || "") }, one || "any state")));
  const rows = el("tbody", {});
  const count = el("p", { class: "note", role: "status" });
  const pages = el("div", { class: "row" });
  const search = (event) => {
    event.preventDefault();
    go({ query: words.value, state: state.value, page: 1 });
  };
  main.replaceChildren(
    el("h1", {}, "Studies"),
    el("form", { role: "search", on: { submit: search } },
      el("label", { for: "words" }, "Words"), words, el("label", { for: "state" }, "State"), state, el("button", {}, "Search")),
    count,
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Studies" }, el("table", {},
      el("thead", {}, el("tr", {}, ["study", "target", "state", "best plan", "step", "evidence", "changed"].map((one) => el("th", { scope: "col" }, one)))),
      rows)),
    pages);
  const show = async () => {
    const wanted = new URLSearchParams({ page, size: 50, query: words.value });
    if (state.value) wanted.set("state", state.value);
    const found = await json(`/v1/studies?${wanted}`);
    rows.replaceChildren(...found.studies.map((one) => el("tr", {},
      el("td", {}, el("a", { href: `/studies/${inPath(one.name)}` }, one.name)),
      el("td", {}, one.target),
      el("td", { class: `state-${one.state}` }, one.state),
      el("td", {}, one.plan || one.problem),
      el("td", { class: "number" }, Format.seconds(one.step_s)),
      el("td", {}, one.evidence),
      el("td", { class: "number" }, day(one.changed_s)))));
    count.textContent = `${found.total} ${found.total === 1 ? "study" : "studies"}`;
    pages.replaceChildren(
      page > 1 ? el("button", { type: "button", on: { click: () => go({ page: page - 1 }) } }, "Previous") : "",
      found.next ? el("button", { type: "button", on: { click: () => go({ page: found.next }) } }, "Next") : "");
  };
  await show();
  setInterval(() => document.hidden || show().catch(() => {}), 5000);
}

function go(changes) {
  const query = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) value ? query.set(name, value) : query.delete(name);
  location.search = query.toString();
}

async function listSubmissions() {
  const found = await json("/v1/submissions?size=200");
  main.replaceChildren(
    el("h1", {}, "Submissions"),
    el("p", { class: "note" }, `${found.total} in all`),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Submissions" }, el("table", {},
      el("thead", {}, el("tr", {}, ["number", "script", "targets", "state", "by", "submitted", ""].map((one) => el("th", { scope: "col" }, one)))),
      el("tbody", {}, found.submissions.map((one) => el("tr", {},
        el("td", {}, el("a", { href: `/submissions/${inPath(one.number)}` }, one.number)),
        el("td", {}, one.order.entry),
        el("td", {}, one.order.targets.join(", ")),
        el("td", { class: `state-${one.state}` }, one.state),
        el("td", {}, one.owner),
        el("td", { class: "number" }, day(one.made_s)),
        el("td", {}, one.said)))))));
}

// One study, or one submission with its studies, live

function watchPage(title, path) {
  const live = el("div", { id: "live" });
  const log = el("pre", { id: "log", role: "log", tabindex: 0, "aria-label": "What the search says" });
  const buttons = el("div", { class: "row" });
  const said = el("p", { role: "status", class: "note", id: "connection" });
  const reports = el("div", { id: "reports" });
  main.replaceChildren(
    el("h1", {}, title), live, buttons, said,
    el("details", { open: true, id: "logs" }, el("summary", {}, "What the search says"), log), reports);
  let shown = "";
  let states = 0;
  const onState = (data) => {
    states += 1;
    live.replaceChildren(data.submission ? submissionFacts(data.submission) : "", ...data.studies.map(studyFacts));
    buttons.replaceChildren(...(data.submission ? actions(data.submission) : []));
    const readable = data.studies.filter((one) => !["unread", "unreadable"].includes(one.state));
    const names = readable.map((one) => one.name).join("\n");
    if (names !== shown) {
      shown = names;
      reports.replaceChildren(...readable.map((one) => report(one.name)));
    }
  };
  const onLog = (text) => {
    const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 20;
    log.append(document.createTextNode(text));
    while (log.childNodes.length > 500) log.firstChild.remove();
    if (atEnd) log.scrollTop = log.scrollHeight;
  };
  watch(`${path}/events`, { state: onState, log: (data) => onLog(data.text) }, (text) => { said.textContent = text; })
    .then(() => {
      // What was shown at first is not the end of it.
      if (states > 1) reports.querySelectorAll("section").forEach((one) => one.reload().catch(fail));
    });
}

function submissionFacts(one) {
  const options = [one.order.targets.join(", "), one.order.space, `budget ${one.order.budget}`, one.order.args.join(" ")];
  return el("p", {},
    el("strong", { class: `state-${one.state}`, id: "state" }, one.state), ` ${one.said}`, el("br"),
    el("span", { class: "note" }, `${one.order.entry} on ${options.filter(Boolean).join(", ")}; by ${one.owner}`));
}

function studyFacts(one) {
  const done = one.compiled + one.failed + one.measured;
  return el("div", { class: "study" },
    el("p", {}, el("a", { href: `/studies/${inPath(one.name)}` }, one.name), ": ",
      el("strong", { class: `state-${one.state}` }, one.state), " ", one.problem || one.sentence || "nothing was tried yet"),
    el("p", { class: "note" },
      el("progress", { max: Math.max(one.legal, 1), value: Math.min(done, one.legal), "aria-label": "Plans that were tried" }), " ",
      `${one.legal} legal plans: ${one.compiled} compiled, ${one.measured} measured, ${one.failed} failed, ${one.waiting} waiting. ${one.stop_reason}`));
}

function actions(one) {
  const act = (what) => async () => {
    await json(`/v1/submissions/${inPath(one.number)}/${what}`, { method: "POST" });
    location.reload();
  };
  const button = (what, text) => el("button", { type: "button", on: { click: act(what) } }, text);
  return ENDED.includes(one.state) ? [button("resume", "Go on")] : [button("cancel", "Cancel")];
}

function report(name) {
  const frame = el("iframe", { sandbox: "allow-scripts allow-downloads", title: `Report of ${name}`, referrerpolicy: "no-referrer" });
  const rule = el("div", {});
  const section = el("section", {});
  section.reload = async () => {
    const { ticket } = await json(`/v1/studies/${inPath(name)}/ticket`);
    frame.src = `/v1/studies/${inPath(name)}/page?ticket=${encodeURIComponent(ticket)}`;
    const found = await json(`/v1/studies/${inPath(name)}`);
    const url = `${location.origin}/v1/studies/${inPath(name)}/rules.toml`;
    rule.replaceChildren(found.rule
      ? el("p", { class: "note" }, "In a training script: ", el("code", {}, `automesh.load(${JSON.stringify(url)}).select()`))
      : el("p", { class: "note" }, `No rule yet: ${found.missing}`));
  };
  const button = el("button", { type: "button", on: { click: () => section.reload().catch(fail) } }, "Load the newest figures");
  section.append(el("h2", {}, "Report"), rule, el("div", { class: "row" }, button), frame);
  section.reload().catch(fail);
  return section;
}

// Server-sent events, by `fetch`: an EventSource cannot send the header with the token.
async function watch(path, handlers, say) {
  let last = "";
  for (;;) {
    try {
      const reply = await ask(path, { headers: { Accept: "text/event-stream", ...(last && { "Last-Event-ID": last }) } });
      say("live");
      const lines = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await lines.read();
        if (done) break;
        const blocks = (rest + value).split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
          const event = { kind: "message", data: [] };
          for (const line of block.split("\n")) {
            const [, name, text] = /^([^:]*):? ?(.*)$/.exec(line);
            if (name === "data") event.data.push(text);
            else if (name === "event") event.kind = text;
            else if (name === "id") last = text;
          }
          if (event.kind === "end") {
            say("ended");
            return;
          }
          if (event.data.length && handlers[event.kind]) handlers[event.kind](JSON.parse(event.data.join("\n")));
        }
      }
    } catch (error) {
      if (error instanceof Refused && error.status !== 429 && error.status < 500) {
        fail(error);
        return;
      }
    }
    say("connecting again ...");
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

function fail(error) {
  if (error instanceof Refused && error.status === 401) login(error.message);
  else main.prepend(el("p", { class: "problem", role: "alert" }, error.message));
}

async function start() {
  if (location.hash.startsWith("#token=")) {
    sessionStorage.setItem(KEY, decodeURIComponent(location.hash.slice(7)));
    history.replaceState(null, "", location.pathname + location.search);
  }
  if (!sessionStorage.getItem(KEY)) {
    login("");
    return;
  }
  try {
    const me = await json("/v1/me");
    document.getElementById("who").textContent = `${me.name} (${me.scope})`;
    const [, kind, name] = /^\/(studies|submissions)\/([^/]+)$/.exec(location.pathname) || [];
    if (name) {
      document.title = `${decodeURIComponent(name)} - automesh`;
      watchPage(decodeURIComponent(name), `/v1/${kind}/${name}`);
    } else if (new URLSearchParams(location.search).get("list") === "submissions") await listSubmissions();
    else await listStudies();
  } catch (error) {
    fail(error);
  }
}

start();
