"use strict";
// What is chosen, searched and asked.

class App extends View {
  setCursor(x) {
    this.cursor = Math.min(Math.max(x, this.start), this.end);
    this.refresh();
    this.redraw();
  }

  // Tables follow the cursor once a frame at most.
  refresh() {
    if (this.stale) return;
    this.stale = true;
    requestAnimationFrame(() => {
      this.stale = false;
      showCursor(this);
      showRunning(this);
    });
  }

  // Select the event at `at` of the id; resolves when its chain is shown.
  async choose(log, what, id, at) {
    this.chosen = { log, what, id, at };
    this.chain = [];
    this.setCursor(log.axes[this.axis][at]);
    await showChosen(this);
  }

  // As `choose`, at the id's last event up to `at`, or at its first.
  chooseAt(log, what, id, at) {
    const lane = log.lanes[what];
    if (!(id >= 0 && id < lane.count) || lane.first[id] === lane.first[id + 1]) return null;
    const entry = Math.max(log.entryAt(lane, id, at), lane.first[id]);
    return this.choose(log, what, id, lane.at[entry]);
  }

  chooseNothing() {
    this.chosen = null;
    this.chain = [];
    showChosen(this);
    this.redraw();
  }

  moveTo(log, at) {
    const x = log.axes[this.axis][at];
    this.setCursor(x);
    if (x < this.view.x0 || x > this.view.x1)
      this.setView(x - (this.view.x1 - this.view.x0) / 2, x + (this.view.x1 - this.view.x0) / 2);
  }

  stepChange(by) {
    if (!this.chosen) return this.stepEvent(by);
    const { log, what, id, at } = this.chosen,
      lane = log.lanes[what];
    const next = log.entryAt(lane, id, at) + by;
    if (next < lane.first[id] || next >= lane.first[id + 1]) return null;
    this.moveTo(log, lane.at[next]);
    return this.choose(log, what, id, lane.at[next]);
  }

  stepEvent(by) {
    const log = this.shown()[0],
      at = Math.min(Math.max(this.placeIn(log) + by, 0), log.events - 1);
    this.moveTo(log, at);
  }

  stepId(by) {
    if (!this.chosen) return;
    const { log, what, id, at } = this.chosen,
      lane = log.lanes[what];
    for (let next = id + by; next >= 0 && next < lane.count; next += by)
      if (lane.first[next] < lane.first[next + 1]) {
        this.chooseAt(log, what, next, at);
        return;
      }
  }

  // The change nearest to a point on a panel, among the ids that share its pixel.
  hit(panel, px, py) {
    const log = panel.log,
      x = this.atX(px),
      at = log.placeAt(this.axis, x),
      lane = panel.lane;
    const low = Math.max(panel.idAt(py), panel.first),
      high = Math.max(low + 1, panel.idAt(py + 1));
    const axis = log.axes[this.axis];
    let best = null;
    for (let row = low; row < high && row < panel.count; row++) {
      const last = lane.last ? lane.last[row] : lane.first[row + 1],
        from = lane.first[row];
      const next = lowerBound(lane.at, at + 1, from, last);
      for (const [e, reach] of [
        [next - 1, Infinity],
        [next, 6],
      ]) {
        if (e < from || e >= last) continue;
        const away = Math.abs(this.xOf(axis[lane.at[e]]) - px);
        if (away <= reach && (!best || away < best.away))
          best = { id: panel.what === "transfer" ? lane.who[e] : row, at: lane.at[e], away };
      }
      best ??= { id: row, at: -1, away: Infinity };
    }
    return best;
  }

  panelAt(y) {
    return this.panels.find((panel) => y >= panel.y && y < panel.y + panel.height);
  }

  click(px, py) {
    const panel = this.panelAt(py),
      found = panel && panel.kind === "lanes" ? this.hit(panel, px, py) : null;
    if (px < GUTTER && !found) return null;
    if (found && found.at >= 0) return this.choose(panel.log, panel.what, found.id, found.at);
    this.setCursor(this.atX(px));
    return null;
  }

  // -- search ----------------------------------------------------------------------------------
  // `block 17`, `page=5`, `request r3` or `r3/4`, `transfer 9`, `seq 1234`, `step 9`; `… @ 1234`.
  async find(text) {
    const [, what, ident, seq] = /^\s*([a-z-]+)[\s=]+(.+?)(?:\s*@\s*(\d+))?\s*$/i.exec(text) || [];
    const log = this.shown()[0],
      kind = (what || "")
        .toLowerCase()
        .replace(/^host-page$/, "page")
        .replace(/s$/, "");
    if (kind === "seq" || kind === "step") {
      const at = kind === "seq" ? log.placeOf(Number(ident)) : log.placeOfStep(Number(ident));
      if (!(at >= 0)) return false;
      this.moveTo(log, at);
      return true;
    }
    if (!WHATS.includes(kind)) return false;
    const at = seq
      ? log.placeOf(Number(seq))
      : this.chosen || this.searched
        ? this.placeIn(log)
        : log.events - 1;
    const id = log.idOf(kind, ident, seq ? at : log.events - 1);
    const done = id < 0 ? null : this.chooseAt(log, kind, id, at);
    if (!done) return false;
    this.reveal(log, kind, id);
    await done;
    this.moveTo(log, this.chosen.at);
    return true;
  }

  // Bring an id into view.
  reveal(log, what, id) {
    const range = this.ranges[what],
      row = what === "transfer" ? log.rowOf(id) : id;
    if (!range || (row >= range.low && row < range.high)) return;
    const size = range.high - range.low,
      low = Math.max(row - size / 2, 0);
    this.ranges[what] = { low, high: low + size };
  }
}

async function main() {
  try {
    const logs = (await Promise.all([Log.open("a"), Log.open("b")])).filter(Boolean);
    const app = new App(logs);
    window.hisparse = app;
    showAbout(app);
    showChosen(app);
    app.setAxis("seq");
    listen(app);
    byId("busy").hidden = true;
    const asked = decodeURIComponent(location.hash.slice(1));
    if (asked) await app.find(asked);
    document.body.dataset.ready = "yes";
  } catch (error) {
    byId("busy").textContent = `the log cannot be shown: ${error.message}`;
    throw error;
  }
}
