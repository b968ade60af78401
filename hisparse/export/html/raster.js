"use strict";
// Lanes as pixels, whatever their number: a pixel is the mean colour of the ids and the time that
// it stands for. Each change adds its difference of colours where it happens, spread over the two
// nearest columns; a running sum along the row then gives every pixel its exact mean. The cost is
// that of the changes in sight and of the pixels, and it can be paid in slices.

// Paints rows [0, height) of `image` (RGBA, width x height): ids [low, high) of `lane` over
// [x0, x1) of `axis`. `palette` holds r, g, b of each state. Yields after every row of ids.
function* paintLanes({ lane, other, axis, x0, x1, low, high, image, width, height, palette }) {
  const pixels = new Uint32Array(image.data.buffer),
    sums = new Float32Array(3 * (width + 2));
  const scale = width / (x1 - x0);
  const from = Math.max(lowerBound(axis, x0), 0); // the first place in sight
  const until = lowerBound(axis, x1);
  const end = Math.max(0, Math.min(width, Math.ceil((axis[axis.length - 1] - x0) * scale)));
  const rows = high - low;
  for (let row = 0; row < height;) {
    const a = Math.floor(low + (row * rows) / height);
    const b = Math.max(a + 1, Math.floor(low + ((row + 1) * rows) / height));
    let next = row + 1; // a lane may be taller than a pixel
    while (next < height && Math.floor(low + (next * rows) / height) === a) next++;
    sums.fill(0);
    let ids = 0;
    for (let id = a; id < b && id < lane.count; id++, ids++) {
      if (other) addBoth(sums, lane, other, id, axis, x0, scale, from, until, palette, width);
      else addLane(sums, lane, id, axis, x0, scale, from, until, palette, width);
    }
    writeRow(pixels, row * width, width, end, sums, ids);
    const gap = next - row >= 5 ? 1 : 0;
    for (let copy = row + 1; copy < next - gap; copy++)
      pixels.copyWithin(copy * width, row * width, (row + 1) * width);
    if (gap) pixels.fill(0, (next - 1) * width, next * width);
    row = next;
    yield;
  }
}

function addLane(sums, lane, id, axis, x0, scale, from, until, palette, width) {
  const first = lane.first[id],
    last = lane.last ? lane.last[id] : lane.first[id + 1];
  const { at, state } = lane;
  let e = lowerBound(at, from, first, last);
  let now = e > first ? state[e - 1] & STATE : 0;
  step(sums, 0, 0, now, palette, true);
  for (; e < last && at[e] < until; e++) {
    const next = state[e] & STATE;
    if (next === now) continue;
    step(sums, (axis[at[e]] - x0) * scale, now, next, palette, false);
    now = next;
  }
}

// The states of two logs at once, as 16 * one + other. `other` comes as {lane, axis, from, until}.
function addBoth(sums, lane, other, id, axis, x0, scale, from, until, palette) {
  const mine = { lane, axis, from, until };
  const walks = [mine, other].map((side) => {
    const { first: f, last: l } = side.lane,
      known = id < side.lane.count;
    const first = known ? f[id] : 0,
      last = known ? (l ? l[id] : f[id + 1]) : 0;
    const e = lowerBound(side.lane.at, side.from, first, last);
    return { ...side, e, last, now: e > first ? side.lane.state[e - 1] & STATE : 0 };
  });
  const xOf = (w) => (w.e < w.last && w.lane.at[w.e] < w.until ? w.axis[w.lane.at[w.e]] : Infinity);
  let now = 16 * walks[0].now + walks[1].now;
  step(sums, 0, 0, now, palette, true);
  for (;;) {
    const [a, b] = walks.map(xOf),
      x = Math.min(a, b);
    if (x === Infinity) return;
    if (a === x) {
      walks[0].now = walks[0].lane.state[walks[0].e] & STATE;
      walks[0].e++;
    }
    if (b === x) {
      walks[1].now = walks[1].lane.state[walks[1].e] & STATE;
      walks[1].e++;
    }
    const next = 16 * walks[0].now + walks[1].now;
    if (next !== now) step(sums, (x - x0) * scale, now, next, palette, false);
    now = next;
  }
}

// From pixel `x` on the colour is that of `next`; before, it was that of `now`.
function step(sums, x, now, next, palette, whole) {
  let r = palette[3 * next],
    g = palette[3 * next + 1],
    b = palette[3 * next + 2];
  if (!whole) {
    r -= palette[3 * now];
    g -= palette[3 * now + 1];
    b -= palette[3 * now + 2];
  }
  const column = Math.max(0, Math.floor(x)),
    part = Math.min(1, Math.max(0, x - column));
  const i = 3 * column,
    here = 1 - part;
  if (i + 5 >= sums.length) return;
  sums[i] += r * here;
  sums[i + 1] += g * here;
  sums[i + 2] += b * here;
  sums[i + 3] += r * part;
  sums[i + 4] += g * part;
  sums[i + 5] += b * part;
}

function writeRow(pixels, at, width, end, sums, ids) {
  let r = 0,
    g = 0,
    b = 0;
  const share = ids ? 1 / ids : 0;
  for (let x = 0, i = 0; x < width; x++, i += 3) {
    r += sums[i];
    g += sums[i + 1];
    b += sums[i + 2];
    pixels[at + x] =
      x >= end || !ids
        ? 0
        : (255 << 24) | ((b * share + 0.5) << 16) | ((g * share + 0.5) << 8) | (r * share + 0.5);
  }
}

// How many ids are in each state, a column of pixels at a time: 16 counts a column, all 0 where the
// log has nothing. Between checkpoints the changes are walked, where columns are closer than those.
function countColumns(log, what, axisName, x0, x1, width) {
  const axis = log.axes[axisName],
    { every, points, begin, moves } = log.counts[what];
  const found = new Int32Array(16 * width),
    now = new Int32Array(16),
    end = axis[log.events];
  const low = lowerBound(axis, x0),
    high = lowerBound(axis, x1);
  const walk = high - low < every * width;
  let at = -1;
  for (let column = 0; column < width; column++) {
    const x = x0 + ((column + 0.5) * (x1 - x0)) / width;
    if (x >= end || x < axis[0]) continue;
    const to = Math.max(0, lowerBound(axis, x + 1e-9, 0, log.events)); // events that have happened
    const point = Math.floor(to / every);
    if (at < 0 || point * every > at) {
      now.set(points.subarray(point * 16, point * 16 + 16));
      at = point * every;
    }
    if (walk) {
      for (let m = begin[at]; m < begin[to]; m++) {
        now[moves[m] >> 4]--;
        now[moves[m] & 15]++;
      }
      at = to;
    }
    found.set(now, 16 * column);
  }
  return found;
}
