"use strict";
// What is worked out of a log when it is opened: axes, copies in flight, states counted.

const CHECKPOINTS = 16384;

// Where on the axis each event stands. Missing seqs take a little room, however many they are.
function seqAxis(log) {
  const axis = new Float64Array(log.events + 1),
    room = Math.max(1, log.events / 40);
  const seqs = log.meta.seqs,
    jumps = new Map();
  for (let i = 1; i < seqs.length; i++) {
    const missing = seqs[i][1] - (seqs[i - 1][1] + seqs[i][0] - seqs[i - 1][0]);
    jumps.set(seqs[i][0], Math.min(missing, room));
  }
  let x = seqs.length ? seqs[0][1] : 1;
  for (let at = 0; at <= log.events; at++, x++) axis[at] = x += jumps.get(at) || 0;
  return axis;
}

// One unit a step, its events evenly spread.
function stepAxis(log) {
  const axis = new Float64Array(log.events + 1),
    steps = log.columns["step.at"];
  let from = 0;
  for (let i = 0; i <= steps.length; i++) {
    const to = i < steps.length ? steps[i] : log.events;
    for (let at = from; at < to; at++) axis[at] = i + (at - from) / (to - from);
    from = to;
  }
  axis[log.events] = steps.length + 1;
  return axis;
}

// Copies in flight share rows: a copy takes the first row that is free when it is pinned.
function lanesInFlight(log) {
  const lane = log.lanes.transfer,
    n = lane.count,
    row = new Uint32Array(n).fill(-1),
    free = [];
  const ends = []; // [place, row] of copies that settle, by place
  const known = (e) => (lane.state[e] & STATE) !== 0 && (lane.state[e] & STATE) !== UNKNOWN;
  const order = Array.from({ length: n }, (_, i) => i).filter(
    (i) => lane.first[i] < lane.first[i + 1] && known(lane.first[i]),
  );
  const end = (i) => {
    for (let e = lane.first[i]; e < lane.first[i + 1]; e++) if (!known(e)) return lane.at[e];
    return Infinity;
  };
  order.sort((a, b) => lane.at[lane.first[a]] - lane.at[lane.first[b]] || a - b);
  let rows = 0;
  for (const i of order) {
    const from = lane.at[lane.first[i]];
    while (ends.length && ends[0][0] <= from) heapPush(free, [heapPop(ends)[1], 0]);
    row[i] = free.length ? heapPop(free)[0] : rows++;
    heapPush(ends, [end(i), row[i]]);
  }
  log.rowsOf = row;
  return byRow(lane, row, rows, order);
}

function byRow(lane, row, rows, order) {
  const first = new Uint32Array(rows + 1);
  const state = lane.state.map((code) => ((code & STATE) === UNKNOWN ? 0 : code));
  for (const i of order) first[row[i] + 1] += lane.first[i + 1] - lane.first[i];
  for (let r = 0; r < rows; r++) first[r + 1] += first[r];
  const next = first.slice(),
    total = first[rows];
  const at = new Uint32Array(total),
    states = new Uint8Array(total),
    who = new Uint32Array(total);
  for (const i of order) {
    for (let e = lane.first[i], settled = false; e < lane.first[i + 1] && !settled; e++) {
      const to = next[row[i]]++;
      at[to] = lane.at[e];
      states[to] = state[e];
      who[to] = i;
      settled = (state[e] & STATE) === 0;
    }
  }
  // A settled copy may still be named (a spill gives its block back): that is not drawn.
  const last = next.subarray(0, rows);
  return {
    what: "transfer",
    first,
    last,
    at,
    state: states,
    who,
    count: rows,
    used: rows,
    names: lane.names,
  };
}

// How many ids are in each state: at checkpoints, and each change between them.
function countStates(log, what) {
  const lane = log.lanes[what],
    n = log.events,
    total = lane.at.length;
  const begin = new Uint32Array(n + 2),
    was = new Uint8Array(total);
  for (let i = 0; i < total; i++) begin[lane.at[i] + 1]++;
  for (let i = 0; i <= n; i++) begin[i + 1] += begin[i];
  const next = begin.slice(),
    moves = new Uint8Array(total);
  for (let id = 0; id < lane.count; id++) {
    let before = 0;
    for (let e = lane.first[id]; e < lane.first[id + 1]; e++) {
      const now = lane.state[e] & STATE;
      moves[next[lane.at[e]]++] = (before << 4) | now;
      before = now;
    }
  }
  const every = Math.max(1, Math.ceil(n / CHECKPOINTS));
  const points = new Int32Array((Math.floor(n / every) + 1) * 16),
    now = new Int32Array(16);
  now[0] = lane.count - 1; // id 0 is null
  for (let at = 0; at <= n; at++) {
    if (at % every === 0) points.set(now, (at / every) * 16);
    for (let m = begin[at]; at < n && m < begin[at + 1]; m++) {
      now[moves[m] >> 4]--;
      now[moves[m] & 15]++;
    }
  }
  const size = lane.count - 1;
  let least = size; // free at once
  for (let i = 0; i < points.length; i += 16) least = Math.min(least, points[i]);
  return { every, points, begin, moves, total: size, peak: size - least };
}
