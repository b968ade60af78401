"use strict";
// The page beside the canvas. Whatever comes from a log is set as text, never as markup.

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "onclick") node.addEventListener("click", value);
    else if (name === "style")
      for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const byId = (id) => document.getElementById(id);
const number = (n) => Number(n).toLocaleString("en");

function showAbout(app) {
  const logs = app.logs.map((log) => {
    const tag = app.logs.length > 1 ? el("span", { class: "tag" }, log.key.toUpperCase()) : null;
    const { lost, error, gaps } = log.meta,
      wrong = [lost, error, ...gaps.map((gap) => gap.reason)];
    const text = [...new Set(wrong.filter(Boolean))].join(" · ");
    return el(
      "span",
      { class: "log" },
      tag,
      el("b", {}, log.meta.name),
      el(
        "span",
        { class: "dim" },
        `${number(log.events)} events, ${number(log.columns["step.at"].length)} steps`,
      ),
      text
        ? el("span", { class: "badge", title: text }, text)
        : el("span", { class: "badge fine" }, "nothing lost"),
    );
  });
  const parted = app.logs[0].meta.divergence;
  const words =
    app.logs.length < 2
      ? null
      : el(
          "span",
          { class: parted ? "badge" : "badge fine" },
          parted ? `the logs part at seq ${number(parted.seq)}` : "the same events",
        );
  byId("about").replaceChildren(...logs, ...(words ? [words] : []));
  document.title = `${app.logs.map((log) => log.meta.name).join(" / ")} – hisparse log`;
}

function showLegend(app) {
  const groups = [
    ["block", "blocks"],
    ["page", "host pages"],
    ["request", "requests"],
    ["transfer", "transfers"],
  ];
  const dot = (hue) => el("i", { class: "dot", style: { background: hue } });
  const items = groups.map(([what, title]) => {
    const names = app.logs[0].lanes[what].names;
    const drawn = names
      .map((name, i) => [name, i])
      .filter(([, i]) => app.logs.some((log) => log.uses[what].has(i)));
    const states = drawn
      .filter(([, i]) => i || what === "block" || what === "page")
      .map(([name]) =>
        el("span", {}, dot(stateHue(app.hues, name)), name.toLowerCase().replace("_", " ")),
      );
    return el("span", { class: "states" }, el("b", {}, title), ...states);
  });
  if (app.mode === "diff") items.push(el("span", {}, dot(app.hues.differ), "A and B differ"));
  byId("legend").replaceChildren(...items);
}

// The state at the cursor: pools and requests by state, in each log that is shown.
function showCursor(app) {
  const nodes = [];
  for (const log of app.shown()) {
    const at = app.placeIn(log);
    const tag = app.logs.length > 1 ? el("span", { class: "tag" }, log.key.toUpperCase()) : null;
    nodes.push(
      el(
        "div",
        { class: "where" },
        tag,
        el("strong", {}, `seq ${number(log.seqOf(at))}`),
        el("span", {}, `step ${number(log.stepOf(at))}`),
        el("span", { class: "dim" }, `${number(log.inFlightAt(at))} copies in flight`),
      ),
    );
    if (log.unknownAt(at)) {
      nodes.push(el("p", { class: "badge" }, `not known here: ${log.unknownAt(at)}`));
      continue;
    }
    for (const what of ["block", "page"])
      nodes.push(...bars(app, log, what, log.countsAt(what, at)));
    const counts = new Int32Array(16);
    for (const [, state] of log.requestsAt(at)) counts[state]++;
    nodes.push(...bars(app, log, "request", counts));
  }
  byId("cursor").replaceChildren(el("h2", {}, "State at the cursor"), ...nodes);
}

function bars(app, log, what, counts) {
  const names = log.lanes[what].names,
    found = [];
  counts.forEach((n, state) => {
    if (n > 0) found.push([names[state] || "UNKNOWN", n, state]);
  });
  const total = found.reduce((sum, [, n]) => sum + n, 0) || 1;
  found.sort((a, b) => (a[2] || 99) - (b[2] || 99)); // what is free comes last
  const bar = el(
    "div",
    { class: "bar" },
    ...found.map(([name, n]) =>
      el("i", { style: { width: `${(100 * n) / total}%`, background: stateHue(app.hues, name) } }),
    ),
  );
  const title = { block: "GPU blocks", page: "host pages", request: "requests" }[what];
  return [
    el("span", { class: "dim" }, title),
    bar,
    el(
      "div",
      { class: "counts" },
      ...found.map(([name, n]) =>
        el(
          "span",
          {},
          el("i", { class: "dot", style: { background: stateHue(app.hues, name) } }),
          `${name.toLowerCase()} `,
          el("b", {}, number(n)),
        ),
      ),
    ),
  ];
}

// What is known of the id that is chosen, at the change that is chosen.
async function showChosen(app) {
  const { chosen } = app;
  if (!chosen) {
    byId("chosen").replaceChildren(
      el("h2", {}, "Selection"),
      el("span", { class: "dim" }, "Click a change on a lane: here is what happened, and why."),
    );
    byId("chain").replaceChildren();
    return;
  }
  const { log, what, id, at } = chosen,
    state = log.lanes[what].names[log.stateAt(what, id, at)] || "UNKNOWN";
  const facts = factsOf(app, log, what, id, at).map(([name, value]) =>
    el("span", {}, `${name} `, el("b", {}, value)),
  );
  const title = el(
    "div",
    { class: "title" },
    el("i", { class: "dot", style: { background: stateHue(app.hues, state) } }),
    log.nameOf(what, id),
    app.logs.length > 1 ? el("span", { class: "tag" }, log.key.toUpperCase()) : null,
    el("button", { onclick: () => app.stepChange(-1), "aria-label": "The change before" }, "‹"),
    el("button", { onclick: () => app.stepChange(1), "aria-label": "The change after" }, "›"),
  );
  const chain = await why(log, what, id, at);
  if (app.chosen !== chosen) return; // another click came first
  const [fields, text] = await log.textOf(at);
  const event = el(
    "div",
    { class: "event", id: "event" },
    `seq ${log.seqOf(at)}  `,
    el("b", {}, log.meta.kinds[log.kind[at]]),
    `  ${fields}`,
  );
  const said = chain.some((link) => link.at === at) ? null : el("p", { class: "dim" }, text);
  byId("chosen").replaceChildren(
    el("h2", {}, "Selection"),
    title,
    el("div", { class: "facts" }, ...facts),
    event,
    ...(said ? [said] : []),
  );
  app.chain = chain;
  showChain(app);
  app.redraw();
}

function factsOf(app, log, what, id, at) {
  const names = log.lanes[what].names,
    facts = [["state", names[log.stateAt(what, id, at)] || "UNKNOWN"]];
  const c = log.columns;
  if (what === "request") {
    const r = log.requests[id];
    facts.push(["prompt", `${number(r.prompt)} tokens`], ["at most", number(r.max)]);
    if (r.admitted >= 0 && r.admitted <= at)
      facts.push(
        ["row", r.row],
        ["planned", `${number(log.plannedOf(id, at))} rows`],
        ["found by prefix", number(r.hit)],
      );
  } else if (what === "transfer") {
    const kinds = app.kinds[c["copy.kind"][id]] || "copy";
    facts.push(
      ["kind", kinds],
      ["block", c["copy.block"][id]],
      ["host page", c["copy.page"][id]],
      ["row", c["copy.row"][id]],
      ["page of the request", c["copy.entry"][id]],
    );
  } else {
    const birth = log.birthAt(what, id, at);
    facts.push(["epoch", log.epochAt(what, id, at)]);
    if (birth && facts[0][1] !== "FREE") {
      if (what === "block") facts.push(["role", birth.role], ["entry", birth.entry]);
      const r = log.tenant(birth.row, birth.at);
      facts.push([
        "given to",
        r < 0 ? `row ${birth.row}` : `${log.nameOf("request", r)} (row ${birth.row})`,
      ]);
    }
  }
  return facts.map(([name, value]) => [name, String(value)]);
}

function showChain(app) {
  const { chain, chosen } = app;
  const items = chain.map((link) =>
    el(
      "li",
      {
        "data-depth": link.depth,
        "data-seq": link.seq,
        style: { "--depth": link.depth },
        title: `${link.kind}  ${link.fields}`,
        onclick: () => app.moveTo(chosen.log, link.at),
      },
      el("span", {}, number(link.seq)),
      el("p", {}, link.depth ? el("span", { class: "because" }, "because ") : null, link.text),
    ),
  );
  byId("chain").replaceChildren(
    el("h2", {}, "Why"),
    el("ol", { class: "chain", id: "links" }, ...items),
  );
}

// Requests that hold a row at the cursor, or wait for one.
function showRunning(app) {
  const log = app.shown()[0],
    at = app.placeIn(log);
  const rows = log.requestsAt(at).filter(([, state]) => state && state !== UNKNOWN);
  const shown = rows.slice(0, 60).map(([i, code]) => {
    const r = log.requests[i],
      state = log.lanes.request.names[code];
    const planned = log.plannedOf(i, at);
    return el(
      "tr",
      { onclick: () => app.chooseAt(log, "request", i, at) },
      el("td", { class: "name", title: r.name }, r.name),
      el(
        "td",
        {},
        el("i", { class: "dot", style: { background: stateHue(app.hues, state) } }),
        state.toLowerCase(),
      ),
      el("td", { class: "number" }, r.admitted >= 0 && r.admitted <= at ? String(r.row) : "–"),
      el(
        "td",
        {},
        el("progress", { max: r.max, value: planned, title: `${planned} of ${r.max} rows` }),
      ),
    );
  });
  byId("running").replaceChildren(
    el("h2", {}, `Requests at the cursor (${rows.length})`),
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el("tr", {}, ...["request", "state", "row", "rows planned"].map((t) => el("th", {}, t))),
      ),
      el("tbody", {}, ...shown),
    ),
  );
}
