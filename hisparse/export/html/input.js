"use strict";
// Mouse, wheel, keys and buttons.

function listen(app) {
  listenToButtons(app);
  listenToMouse(app);
  listenToKeys(app);
  byId("search").addEventListener("submit", async (event) => {
    event.preventDefault();
    byId("query").classList.toggle("unknown", !(await app.find(byId("query").value)));
  });
  byId("query").addEventListener("input", () => byId("query").classList.remove("unknown"));
}

function listenToButtons(app) {
  for (const button of byId("axes").children)
    button.addEventListener("click", () => app.setAxis(button.dataset.axis));
  const on = (id, act) => byId(id).addEventListener("click", act);
  on("in", () => app.zoom(0.5));
  on("out", () => app.zoom(2));
  on("fit", () => app.fit());
  on("theme", () => app.setTheme(app.view.theme === "dark" ? "light" : "dark"));
  on("keys", () => byId("help").showModal());
  if (app.logs.length < 2) return;
  const modes = [
    ["a", "A"],
    ["b", "B"],
    ["both", "A over B"],
    ["diff", "differences"],
  ];
  byId("modes").hidden = false;
  byId("modes").replaceChildren(
    ...modes.map(([mode, text]) =>
      el(
        "button",
        {
          "data-mode": mode,
          "aria-pressed": String(mode === app.mode),
          onclick: () => app.setMode(mode),
        },
        text,
      ),
    ),
  );
}

function listenToMouse(app) {
  const plot = app.canvas;
  let held = null;
  plot.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const amount = (event.deltaY || event.deltaX) * (event.deltaMode === 1 ? 16 : 1);
      const panel = app.panelAt(event.offsetY);
      if (event.shiftKey && panel && panel.kind === "lanes")
        app.zoomIds(panel, Math.exp(amount / 400), event.offsetY);
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) shift(app, event.deltaX);
      else app.zoom(Math.exp(amount / 400), app.atX(Math.max(event.offsetX, GUTTER)));
    },
    { passive: false },
  );
  plot.addEventListener("pointerdown", (event) => {
    held = {
      x: event.offsetX,
      y: event.offsetY,
      lastX: event.offsetX,
      lastY: event.offsetY,
      panel: app.panelAt(event.offsetY),
      moved: false,
    };
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    if (!held) {
      showTip(app, event.offsetX, event.offsetY);
      return;
    }
    held.moved ||= Math.hypot(event.offsetX - held.x, event.offsetY - held.y) > 4;
    if (!held.moved) return;
    plot.classList.add("moving");
    byId("tip").hidden = true;
    shift(app, held.lastX - event.offsetX);
    if (held.panel && held.panel.kind === "lanes")
      shiftIds(app, held.panel, held.lastY - event.offsetY);
    held.lastX = event.offsetX;
    held.lastY = event.offsetY;
  });
  plot.addEventListener("pointerup", (event) => {
    if (held && !held.moved) app.click(event.offsetX, event.offsetY);
    held = null;
    plot.classList.remove("moving");
  });
  plot.addEventListener("dblclick", (event) => app.zoom(0.25, app.atX(event.offsetX)));
  plot.addEventListener("pointerleave", () => {
    byId("tip").hidden = true;
  });
}

function shift(app, pixels) {
  const by = (pixels / app.wide) * (app.view.x1 - app.view.x0);
  app.setView(app.view.x0 + by, app.view.x1 + by);
}

function shiftIds(app, panel, pixels) {
  const range = app.ranges[panel.what],
    size = range.high - range.low;
  const most = Math.max(...app.panels.filter((p) => p.what === panel.what).map((p) => p.count));
  const low = Math.min(
    Math.max(range.low + (pixels / panel.height) * size, panel.first),
    Math.max(most - size, panel.first),
  );
  app.ranges[panel.what] = { low, high: low + size };
  app.redraw();
}

function showTip(app, px, py) {
  const tip = byId("tip"),
    panel = app.panelAt(py);
  if (px < GUTTER || !panel || px > GUTTER + app.wide) {
    tip.hidden = true;
    return;
  }
  const log = panel.log,
    at = log.placeAt(app.axis, app.atX(px));
  const lines = [`seq ${number(log.seqOf(at))}  step ${number(log.stepOf(at))}`];
  const found = panel.kind === "lanes" ? app.hit(panel, px, py) : null;
  if (found && !(panel.what === "transfer" && found.at < 0)) {
    const state = log.lanes[panel.what].names[log.stateAt(panel.what, found.id, at)] || "UNKNOWN";
    lines.unshift(`${log.nameOf(panel.what, found.id)}  ${state}`);
  }
  tip.textContent = lines.join("\n");
  tip.hidden = false;
  tip.style.left = `${Math.min(px + 14, app.width - tip.offsetWidth - 6)}px`;
  tip.style.top = `${Math.min(py + 14, app.height - tip.offsetHeight - 6)}px`;
}

function listenToKeys(app) {
  const wide = () => app.wide * 0.1;
  const acts = {
    ArrowLeft: () => app.stepChange(-1),
    ArrowRight: () => app.stepChange(1),
    ArrowUp: () => app.stepId(-1),
    ArrowDown: () => app.stepId(1),
    "[": () => app.stepEvent(-1),
    "]": () => app.stepEvent(1),
    a: () => shift(app, -wide()),
    d: () => shift(app, wide()),
    "+": () => app.zoom(0.5),
    "=": () => app.zoom(0.5),
    "-": () => app.zoom(2),
    0: () => app.fit(),
    s: () => app.setAxis(app.axis === "seq" ? "step" : "seq"),
    t: () => app.setTheme(app.view.theme === "dark" ? "light" : "dark"),
    "/": () => byId("query").focus(),
    "?": () => byId("help").showModal(),
    Escape: () => app.chooseNothing(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.target === byId("query")) {
      if (event.key === "Escape") app.canvas.focus();
      return;
    }
    const act = acts[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
    event.preventDefault();
    act();
  });
}

main();
