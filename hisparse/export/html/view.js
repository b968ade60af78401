"use strict";
// What is in view: panels under each other, frames, and the ways to move.

class View {
  constructor(logs) {
    this.logs = logs;
    this.kinds = logs[0].meta.copies;
    this.canvas = byId("plot");
    this.ctx = this.canvas.getContext("2d");
    this.mode = logs.length > 1 ? "both" : "a";
    this.chain = [];
    this.chosen = null;
    this.frames = [];
    this.view = { axis: "seq", x0: 0, x1: 1, theme: "light" };
    this.cursor = 0;
    this.ranges = {}; // what -> ids in view, the same for both logs
    this.setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    this.build();
    this.fit();
    this.setCursor(this.startOf(logs[0]));
    new ResizeObserver(() => this.redraw()).observe(byId("stage"));
  }

  shown() {
    if (this.logs.length < 2) return this.logs;
    return { a: [this.logs[0]], b: [this.logs[1]] }[this.mode] || this.logs;
  }

  get axis() {
    return this.view.axis;
  }
  get hues() {
    return HUES[this.view.theme];
  }
  get start() {
    return Math.min(...this.logs.map((log) => log.axes[this.axis][0]));
  }
  get end() {
    return Math.max(
      ...this.logs.map((log) => log.axes[this.axis][log.events] + log.tail(this.axis)),
    );
  }
  xOf(x) {
    return GUTTER + ((x - this.view.x0) / (this.view.x1 - this.view.x0)) * this.wide;
  }
  atX(pixel) {
    return this.view.x0 + ((pixel - GUTTER) / this.wide) * (this.view.x1 - this.view.x0);
  }
  placeIn(log) {
    return log.placeAt(this.axis, this.cursor);
  }
  startOf(log) {
    return log.axes[this.axis][Math.floor(log.events / 2)] || 0;
  }

  // -- panels ----------------------------------------------------------------------------------
  build() {
    const shown = this.mode === "diff" ? [this.logs[0]] : this.shown();
    const other = this.mode === "diff" ? this.logs[1] : null,
      half = shown.length > 1 ? 0.5 : 1;
    const each = (make) => shown.map(make);
    this.panels = [
      ...this.shown().map(
        (log) => new Panel("pool", "block", log, null, 1.1 / this.shown().length),
      ),
      ...this.shown().map((log) => new Panel("pool", "page", log, null, 1.1 / this.shown().length)),
      ...each((log) => new Panel("lanes", "request", log, other, 2.6 * half)),
      ...each((log) => new Panel("lanes", "transfer", log, other, 1.2 * half)),
      ...each((log) => new Panel("lanes", "block", log, other, 4 * half)),
      ...each((log) => new Panel("lanes", "page", log, other, 4 * half)),
    ].filter((panel) =>
      panel.kind === "lanes" ? panel.count > panel.first : panel.log.counts[panel.what].total > 0,
    );
    for (const panel of this.panels) {
      if (panel.kind !== "lanes") continue;
      const same = this.panels.filter((p) => p.what === panel.what && p.kind === "lanes");
      this.ranges[panel.what] ??= {
        low: panel.first,
        high: Math.max(...same.map((p) => p.lane.used)),
      };
    }
    showLegend(this);
  }

  layout() {
    const stage = byId("stage"),
      ratio = Math.min(devicePixelRatio || 1, 2);
    const { clientWidth: width, clientHeight: height } = stage;
    if (this.width !== width || this.height !== height || this.ratio !== ratio) {
      this.canvas.width = width * ratio;
      this.canvas.height = height * ratio;
    }
    Object.assign(this, { width, height, ratio, wide: Math.max(50, width - GUTTER - 12) });
    const room = height - RULER - STRIP - PAD * this.panels.length;
    const total = this.panels.reduce((sum, panel) => sum + panel.weight, 0);
    let y = RULER + STRIP;
    for (const panel of this.panels) {
      const tall = Math.max(14, Math.floor((room * panel.weight) / total));
      panel.place(y, tall, this.ranges[panel.what]);
      y += tall + PAD;
    }
  }

  // -- frames ----------------------------------------------------------------------------------
  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.frame();
    });
  }

  frame() {
    const began = performance.now();
    this.layout();
    let more = false;
    for (const panel of this.panels) {
      if (panel.kind !== "lanes") continue;
      const wanted = panel.wanted(this.view, this.wide, this.ratio);
      more = panel.paint(wanted, this.hues, began + SLICE_MS) || more;
    }
    this.draw();
    this.settled = !more;
    this.frames.push(performance.now() - began);
    if (this.frames.length > 4000) this.frames.splice(0, 2000);
    if (more) this.redraw();
  }

  draw() {
    const { ctx, hues, wide } = this;
    ctx.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    ctx.fillStyle = hues.back;
    ctx.fillRect(0, 0, this.width, this.height);
    drawRuler(ctx, this, wide);
    for (const panel of this.panels) {
      if (panel.kind === "pool") panel.drawPool(ctx, this.view, wide, hues);
      else panel.draw(ctx, this.view, wide);
      drawLabels(ctx, this, panel);
      for (const gap of panel.log.holes(this.axis))
        drawHatched(
          ctx,
          this,
          gap.x0,
          gap.x1,
          panel.y,
          panel.height,
          panel.what === "block" && panel.kind === "lanes" ? gap.text : "",
        );
    }
    this.outline(ctx);
    drawChain(ctx, this, wide);
    const parted = this.logs[0].meta.divergence,
      log = this.shown()[0];
    if (parted) {
      const place = Math.max(0, this.logs[0].placeOf(parted.seq));
      drawLine(
        ctx,
        this,
        this.logs[0].axes[this.axis][place],
        hues.differ,
        `A ≠ B from seq ${parted.seq}`,
        true,
      );
    }
    drawLine(
      ctx,
      this,
      this.cursor,
      hues.ink,
      `seq ${number(log.seqOf(this.placeIn(log)))}`,
      false,
    );
  }

  outline(ctx) {
    if (!this.chosen) return;
    const { what, id, log } = this.chosen;
    for (const panel of this.panels) {
      if (panel.kind !== "lanes" || panel.what !== what || (panel.log !== log && !panel.other))
        continue;
      const row = what === "transfer" ? log.rowOf(id) : id,
        y = panel.yOf(row),
        next = panel.yOf(row + 1);
      if (next < panel.y || y > panel.y + panel.height) continue;
      ctx.strokeStyle = this.hues.ink;
      ctx.lineWidth = 1.25;
      ctx.strokeRect(GUTTER - 1, y - 1.5, this.wide + 2, Math.max(next - y + 2, 4));
      if (y < panel.y + 36) continue; // the title is there
      ctx.fillStyle = this.hues.ink;
      ctx.textAlign = "right";
      ctx.textBaseline = "middle";
      ctx.font = "600 10px ui-monospace, 'DejaVu Sans Mono', monospace";
      const name =
        what === "request" ? log.requests[id].name : log.nameOf(what, id).split(" ").pop();
      fitText(ctx, name, GUTTER - 6, (y + next) / 2, GUTTER - 18);
    }
  }

  // -- the view --------------------------------------------------------------------------------
  setView(x0, x1) {
    const all = this.end - this.start,
      least = Math.min(all, this.axis === "step" ? 0.05 : 8);
    let width = Math.min(Math.max(x1 - x0, least), all * 1.04);
    const middle = (x0 + x1) / 2;
    x0 = Math.min(
      Math.max(middle - width / 2, this.start - all * 0.02),
      this.end + all * 0.02 - width,
    );
    Object.assign(this.view, { x0, x1: x0 + width });
    this.redraw();
  }

  fit() {
    this.setView(this.start, this.end);
    for (const what of Object.keys(this.ranges)) delete this.ranges[what];
    this.build();
    this.redraw();
  }

  zoom(factor, x = (this.view.x0 + this.view.x1) / 2) {
    const { x0, x1 } = this.view;
    this.setView(x - (x - x0) * factor, x + (x1 - x) * factor);
  }

  zoomIds(panel, factor, y) {
    const range = this.ranges[panel.what],
      all = Math.max(...this.panels.filter((p) => p.what === panel.what).map((p) => p.count));
    const id = range.low + ((y - panel.y) / panel.height) * (range.high - range.low);
    const size = Math.min(Math.max((range.high - range.low) * factor, 4), all - panel.first);
    const share = (id - range.low) / (range.high - range.low);
    const low = Math.min(Math.max(id - share * size, panel.first), all - size);
    this.ranges[panel.what] = { low, high: low + size };
    this.redraw();
  }

  setAxis(name) {
    const log = this.logs[0],
      places = [this.view.x0, this.view.x1].map((x) => log.placeAt(this.axis, x));
    const whole = this.view.x1 - this.view.x0 >= (this.end - this.start) * 0.98,
      at = this.placeIn(log);
    this.view.axis = name;
    for (const button of byId("axes").children)
      button.setAttribute("aria-pressed", button.dataset.axis === name);
    this.setCursor(log.axes[name][at] || 0);
    if (whole) this.setView(this.start, this.end);
    else
      this.setView(log.axes[name][places[0]], log.axes[name][Math.min(places[1] + 1, log.events)]);
  }

  setTheme(name) {
    this.view.theme = name;
    document.documentElement.dataset.theme = name;
    if (this.panels) {
      showLegend(this);
      this.refresh();
      this.redraw();
    }
  }

  setMode(name) {
    this.mode = name;
    for (const button of byId("modes").children)
      button.setAttribute("aria-pressed", button.dataset.mode === name);
    this.build();
    this.refresh();
    this.redraw();
  }
}
