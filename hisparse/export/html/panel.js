"use strict";
// A panel of lanes or of a pool, and the colours of states.
//
// A panel shows its last painting, moved and stretched to the view, until a sharper one is done:
// what a frame costs does not depend on the log. `SLICE_MS` of a frame go to painting.

const GUTTER = 116,
  RULER = 24,
  STRIP = 30,
  PAD = 8,
  SLICE_MS = 5;
const HUES = {
  light: {
    FREE: "#edf1f4",
    GONE: "#f8fafb",
    SETTLED: "#f8fafb",
    RESERVED: "#9db0c4",
    DIRTY: "#e69f00",
    PINNED: "#d55e00",
    ENQUEUED: "#cc79a7",
    CLEAN: "#1aa37a",
    CACHED: "#7cc4ee",
    QUARANTINED: "#7a1f3d",
    COMPLETED: "#1aa37a",
    PUBLISHED: "#2a7fc1",
    FAILED: "#b00020",
    WAITING: "#b4c1cf",
    ADMITTED: "#e3cf3c",
    PREFILL: "#e69f00",
    DECODE: "#1aa37a",
    FINISHED: "#7cc4ee",
    ABORTED: "#b00020",
    PREEMPTED: "#d55e00",
    DRAINING: "#cc79a7",
    CANCEL_REQUESTED: "#e3cf3c",
    CANCELLED: "#9db0c4",
    UNKNOWN: "#dfe3e8",
    back: "#ffffff",
    ink: "#17202b",
    dim: "#5c6b7c",
    line: "#d9e0e7",
    accent: "#0b62c4",
    differ: "#c2185b",
  },
  dark: {
    FREE: "#19222e",
    GONE: "#111822",
    SETTLED: "#111822",
    RESERVED: "#5d7187",
    DIRTY: "#e69f00",
    PINNED: "#e5672a",
    ENQUEUED: "#d685b3",
    CLEAN: "#14a37c",
    CACHED: "#3f89b8",
    QUARANTINED: "#a83a63",
    COMPLETED: "#14a37c",
    PUBLISHED: "#2d7fc4",
    FAILED: "#ff5566",
    WAITING: "#4d5f73",
    ADMITTED: "#e3cf3c",
    PREFILL: "#e69f00",
    DECODE: "#14a37c",
    FINISHED: "#3f89b8",
    ABORTED: "#ff5566",
    PREEMPTED: "#e5672a",
    DRAINING: "#d685b3",
    CANCEL_REQUESTED: "#e3cf3c",
    CANCELLED: "#5d7187",
    UNKNOWN: "#2a333f",
    back: "#10161f",
    ink: "#e4eaf1",
    dim: "#94a3b5",
    line: "#263241",
    accent: "#6cb2ff",
    differ: "#ff4f9a",
  },
};
const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

function stateHue(hues, name) {
  return hues[name] || hues.UNKNOWN;
}

// r, g, b of each state; in a comparison of each pair of states, where differing ones stand out.
function paletteOf(hues, names, compare) {
  const colours = Array.from({ length: 16 }, (_, i) => rgb(stateHue(hues, names[i] || "UNKNOWN")));
  if (!compare) return new Float32Array(colours.flat());
  const back = rgb(hues.back),
    mark = rgb(hues.differ),
    found = [];
  for (let a = 0; a < 16; a++)
    for (let b = 0; b < 16; b++)
      found.push(...(a === b ? colours[a].map((v, i) => v * 0.3 + back[i] * 0.7) : mark));
  return new Float32Array(found);
}

class Panel {
  constructor(kind, what, log, other, weight) {
    Object.assign(this, { kind, what, log, other, weight, painted: null, base: null, job: null });
    this.lane = kind === "lanes" ? (what === "transfer" ? log.rows : log.lanes[what]) : null;
    this.first = what === "block" || what === "page" ? 1 : 0; // id 0 of a pool is null
    this.count = this.lane ? this.lane.count : 0;
  }

  place(y, height, range) {
    Object.assign(this, { y, height });
    this.range = range;
  }

  idAt(y) {
    const { low, high } = this.range;
    return Math.floor(low + ((y - this.y) / this.height) * (high - low));
  }

  yOf(id) {
    const { low, high } = this.range;
    return this.y + ((id - low) / (high - low)) * this.height;
  }

  wanted(view, width, ratio) {
    return {
      axis: view.axis,
      x0: view.x0,
      x1: view.x1,
      low: this.range.low,
      high: this.range.high,
      width: Math.max(1, Math.round(width * ratio)),
      theme: view.theme,
      height: Math.max(1, Math.round(this.height * ratio)),
    };
  }

  // Paint towards `wanted` until `deadline`; true if there is more to do.
  paint(wanted, hues, deadline) {
    if (!this.job) {
      if (this.painted && same(this.painted.at, wanted)) return false;
      const canvas = document.createElement("canvas");
      canvas.width = wanted.width;
      canvas.height = wanted.height;
      const image = new ImageData(wanted.width, wanted.height);
      const rows = paintLanes({
        ...wanted,
        ...this.sources(wanted),
        image,
        palette: paletteOf(hues, this.lane.names, this.other),
      });
      this.job = { rows, canvas, image, at: wanted };
    }
    do {
      if (this.job.rows.next().done) {
        const { canvas, image, at } = this.job;
        canvas.getContext("2d").putImageData(image, 0, 0);
        this.painted = { canvas, at };
        if (
          !this.base ||
          this.base.at.theme !== at.theme ||
          this.base.at.axis !== at.axis ||
          span(at) > span(this.base.at) * 0.99
        )
          this.base = this.painted;
        this.job = null;
        return !same(at, wanted);
      }
    } while (performance.now() < deadline);
    return true;
  }

  sources({ axis: name, x0, x1 }) {
    const axis = this.log.axes[name];
    if (!this.other) return { lane: this.lane, axis };
    const theirs = this.other.axes[name],
      lane = this.otherLane();
    const other = {
      lane,
      axis: theirs,
      from: lowerBound(theirs, x0),
      until: lowerBound(theirs, x1),
    };
    return { lane: this.lane, axis, other };
  }

  // The other log's lanes, a request under the number that this log has for it.
  otherLane() {
    if (this.what === "transfer") return this.other.rows;
    const lane = this.other.lanes[this.what];
    if (this.what !== "request") return lane;
    const key = (r) => `${r.epoch} ${r.name}`;
    const ids = new Map(this.other.requests.map((r, i) => [key(r), i]));
    const mine = this.log.requests.map((r) => ids.get(key(r)));
    const first = mine.map((i) => (i === undefined ? 0 : lane.first[i]));
    const last = mine.map((i) => (i === undefined ? 0 : lane.first[i + 1]));
    return { ...lane, first, last, count: mine.length };
  }

  draw(ctx, view, width) {
    ctx.save();
    ctx.beginPath();
    ctx.rect(GUTTER, this.y, width, this.height);
    ctx.clip();
    ctx.imageSmoothingEnabled = false;
    const usable = (p) => p && p.at.axis === view.axis && p.at.theme === view.theme;
    for (const layer of new Set([this.base, this.painted]))
      if (usable(layer)) this.drawLayer(ctx, layer, view, width);
    ctx.restore();
  }

  drawLayer(ctx, { canvas, at }, view, width) {
    const sx = width / (view.x1 - view.x0),
      sy = this.height / (this.range.high - this.range.low);
    const x = GUTTER + (at.x0 - view.x0) * sx,
      y = this.y + (at.low - this.range.low) * sy;
    ctx.drawImage(canvas, x, y, (at.x1 - at.x0) * sx, (at.high - at.low) * sy);
  }

  // What the height of a pool stands for: all of it, or its peak where that is little.
  get scale() {
    const { total, peak } = this.log.counts[this.what];
    return peak > total / 3 ? total : Math.max(1, Math.ceil(peak * 1.1));
  }

  // Stacked states of a pool.
  drawPool(ctx, view, width, hues) {
    const key = [view.x0, view.x1, width, this.height, view.axis, view.theme].join();
    if (this.poolKey !== key) {
      this.poolKey = key;
      this.pool ??= document.createElement("canvas");
      this.pool.width = width;
      this.pool.height = this.height;
      const image = this.stacked(view, width, hues);
      this.pool.getContext("2d").putImageData(image, 0, 0);
    }
    ctx.drawImage(this.pool, GUTTER, this.y, width, this.height);
  }

  stacked(view, width, hues) {
    const { height, scale, log, what } = this,
      image = new ImageData(width, height);
    const pixels = new Uint32Array(image.data.buffer),
      names = log.lanes[what].names;
    const colours = Array.from({ length: 16 }, (_, state) => {
      const [r, g, b] = rgb(stateHue(hues, names[state] || "UNKNOWN"));
      return (255 << 24) | (b << 16) | (g << 8) | r;
    });
    const counts = countColumns(log, what, view.axis, view.x0, view.x1, width);
    for (let x = 0; x < width; x++) {
      let sum = 0,
        y = height; // from below, what is free on top
      for (let state = 1; state <= 16; state++) {
        sum += counts[16 * x + (state & 15)];
        const top = state === 16 && sum ? 0 : Math.max(0, Math.round(height * (1 - sum / scale)));
        while (y > top) pixels[--y * width + x] = colours[state & 15];
      }
    }
    return image;
  }
}

const span = (at) => (at.x1 - at.x0) * (at.high - at.low);

function same(a, b) {
  return Object.keys(b).every((key) => a[key] === b[key]);
}
