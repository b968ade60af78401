"use strict";
// The canvas around the lanes: ruler, chain, labels, hatching, lines.

// Round numbers about `pixels` apart.
function ticksOf(x0, x1, width, pixels) {
  const rough = ((x1 - x0) * pixels) / width,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, power * [1, 2, 5, 10].find((m) => m * power >= rough));
  const found = [];
  for (let x = Math.ceil(x0 / step) * step; x <= x1; x += step) found.push(x);
  return found;
}

function drawRuler(ctx, app, width) {
  const { hues, view } = app;
  const log = app.logs.reduce((a, b) => (b.events > a.events ? b : a)); // it has the last label
  ctx.font = "11px ui-monospace, 'DejaVu Sans Mono', monospace";
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  ctx.fillStyle = hues.dim;
  ctx.fillText(view.axis, 12, RULER / 2 + 1);
  for (const tick of ticksOf(view.x0, view.x1, width, 110)) {
    const x = Math.round(app.xOf(tick)) + 0.5;
    if (x < GUTTER) continue;
    ctx.fillStyle = hues.line;
    ctx.fillRect(x - 0.5, RULER - 6, 1, app.height - RULER + 6);
    const at = log.placeAt(view.axis, tick);
    const label = number(view.axis === "step" ? log.stepOf(at) : log.seqOf(at));
    const fits = x + 4 + ctx.measureText(label).width < GUTTER + width + 8;
    ctx.fillStyle = hues.dim;
    if (tick <= app.end && fits) ctx.fillText(label, x + 4, RULER / 2 + 1);
  }
}

// Arcs from each event of the chain to what caused it.
function drawChain(ctx, app, width) {
  const { chain, chosen, hues, view } = app,
    bottom = RULER + STRIP - 5;
  ctx.fillStyle = hues.dim;
  ctx.textAlign = "left";
  ctx.font = "600 11px system-ui, 'DejaVu Sans', sans-serif";
  ctx.fillText("why", 12, RULER + STRIP / 2);
  if (!chosen || !chain.length) return;
  const axis = chosen.log.axes[view.axis],
    above = [];
  ctx.save();
  ctx.beginPath();
  ctx.rect(GUTTER, 0, width, app.height);
  ctx.clip();
  const xs = chain.map((link) => app.xOf(axis[link.at]));
  ctx.globalAlpha = 0.16;
  ctx.fillStyle = hues.accent;
  for (const x of new Set(xs.map(Math.round))) ctx.fillRect(x, bottom, 1, app.height - bottom);
  ctx.globalAlpha = 1;
  ctx.strokeStyle = hues.accent;
  ctx.lineWidth = 1.3;
  chain.forEach((link, i) => {
    above[link.depth] = xs[i];
    if (!link.depth || above[link.depth - 1] === undefined) return;
    const from = above[link.depth - 1],
      height = Math.min(STRIP - 8, 6 + Math.abs(from - xs[i]) / 5);
    ctx.beginPath();
    ctx.moveTo(from, bottom);
    ctx.quadraticCurveTo((from + xs[i]) / 2, bottom - 2 * height, xs[i], bottom);
    ctx.stroke();
  });
  chain.forEach((link, i) => {
    ctx.beginPath();
    ctx.arc(xs[i], bottom, link.depth ? 3 : 4, 0, 7);
    ctx.fillStyle = link.depth ? hues.back : hues.accent;
    ctx.fill();
    ctx.stroke();
  });
  ctx.restore();
}

function drawLabels(ctx, app, panel) {
  const { hues } = app,
    low = panel.range ? panel.range.low : 0;
  const rows = panel.range ? panel.range.high - low : 0,
    tall = rows ? panel.height / rows : 0;
  ctx.textAlign = "left";
  ctx.textBaseline = "alphabetic";
  ctx.fillStyle = hues.ink;
  ctx.font = "600 11px system-ui, 'DejaVu Sans', sans-serif";
  const title =
    panel.kind === "pool"
      ? panel.what === "block"
        ? "GPU pool"
        : "host pool"
      : TITLES[panel.what];
  const tag = app.logs.length > 1 && !panel.other ? `${panel.log.key.toUpperCase()} ` : "";
  fitText(ctx, tag + title, 12, panel.y + 11, GUTTER - 18);
  ctx.fillStyle = hues.dim;
  ctx.font = "10px ui-monospace, 'DejaVu Sans Mono', monospace";
  if (panel.kind === "pool") {
    const { total, peak } = panel.log.counts[panel.what];
    const text = `peak ${number(peak)}${panel.height > 40 ? "" : ` of ${number(total)}`}`;
    fitText(ctx, text, 12, panel.y + 24, GUTTER - 18);
    if (panel.height > 40) fitText(ctx, `of ${number(total)}`, 12, panel.y + 36, GUTTER - 18);
    return;
  }
  if (tall < 11 || panel.what === "transfer") {
    if (panel.height < 26) return;
    const text =
      panel.what === "request" || panel.what === "transfer"
        ? `${Math.ceil(rows)} ${panel.what === "request" ? "by arrival" : "at once"}`
        : `${number(Math.floor(low))}–${number(Math.ceil(panel.range.high) - 1)}`;
    fitText(ctx, text, 12, panel.y + 24, GUTTER - 18);
    if (panel.height > 40 && panel.count > panel.lane.used && panel.range.high <= panel.lane.used)
      fitText(ctx, `of ${number(panel.count - 1)}`, 12, panel.y + 36, GUTTER - 18);
    return;
  }
  for (
    let id = Math.max(Math.floor(low), panel.first);
    id < panel.range.high && id < panel.count;
    id++
  ) {
    const y = panel.yOf(id) + tall / 2 + 3;
    if (y < panel.y + 20 || y > panel.y + panel.height) continue;
    const name = panel.what === "request" ? panel.log.requests[id].name : String(id);
    fitText(ctx, name, 22, y, GUTTER - 28);
  }
}

function fitText(ctx, text, x, y, room) {
  while (text.length > 1 && ctx.measureText(text).width > room) text = `${text.slice(0, -2)}…`;
  ctx.fillText(text, x, y);
}

// Where the log says nothing: diagonal lines, and why.
function drawHatched(ctx, app, x0, x1, y, height, text) {
  const a = Math.max(app.xOf(x0), GUTTER),
    b = Math.min(app.xOf(x1), GUTTER + app.wide);
  if (b <= a) return;
  ctx.save();
  ctx.beginPath();
  ctx.rect(a, y, Math.max(b - a, 2), height);
  ctx.clip();
  ctx.fillStyle = app.hues.back;
  ctx.globalAlpha = 0.75;
  ctx.fillRect(a, y, b - a, height);
  ctx.globalAlpha = 0.55;
  ctx.strokeStyle = app.hues.FAILED;
  ctx.lineWidth = 1.2;
  ctx.beginPath();
  for (let x = a - height - ((a - height) % 9); x < b; x += 9) {
    ctx.moveTo(x, y + height);
    ctx.lineTo(x + height, y);
  }
  ctx.stroke();
  ctx.globalAlpha = 1;
  const long = Math.max(b - a, height) - 20;
  if (text && b - a > 24 && long > 60) {
    ctx.translate((a + b) / 2, y + height / 2);
    if (height > b - a) ctx.rotate(-Math.PI / 2);
    ctx.font = "600 11px system-ui, 'DejaVu Sans', sans-serif";
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    const w = Math.min(ctx.measureText(text).width, long) + 12;
    ctx.fillStyle = app.hues.back;
    ctx.fillRect(-w / 2, -10, w, 20);
    ctx.fillStyle = app.hues.FAILED;
    fitText(ctx, text, 0, 0, long);
  }
  ctx.restore();
}

function drawLine(ctx, app, x, colour, label, dashed) {
  const at = Math.round(app.xOf(x)) + 0.5;
  if (at < GUTTER || at > GUTTER + app.wide) return;
  ctx.save();
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1.5;
  if (dashed) ctx.setLineDash([5, 4]);
  ctx.beginPath();
  ctx.moveTo(at, RULER - 4);
  ctx.lineTo(at, app.height);
  ctx.stroke();
  ctx.font = "600 11px system-ui, 'DejaVu Sans', sans-serif";
  ctx.textBaseline = "middle";
  const w = ctx.measureText(label).width + 10,
    left = Math.min(at, GUTTER + app.wide - w);
  ctx.fillStyle = colour;
  ctx.fillRect(left, 3, w, 17);
  ctx.fillStyle = app.hues.back;
  ctx.textAlign = "left";
  ctx.fillText(label, left + 5, 12);
  ctx.restore();
}
