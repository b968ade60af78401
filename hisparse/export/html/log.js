"use strict";
// A log as it comes in the page: inflated, and indexed for what is asked of it.
//
// Events are counted by their place in the log, from 0. `seq` runs along but where events are
// missing. A lane is the entries of one id: lane.at[first[id] .. first[id + 1]) are places,
// lane.state the state after each (low bits) and whether the event names the id (NAMED).

const UNKNOWN = 15,
  STATE = 15,
  NAMED = 0x40;
const WHATS = ["request", "transfer", "block", "page"];
const TITLES = {
  request: "requests",
  transfer: "transfers",
  block: "GPU blocks",
  page: "host pages",
};

class Log {
  static async open(name) {
    const node = document.getElementById(`${name}-columns`);
    if (!node) return null;
    const bytes = await inflate(node.textContent.trim());
    node.remove(); // megabytes that nobody reads again
    return new Log(name, ...unpackColumns(bytes));
  }

  constructor(name, meta, columns) {
    Object.assign(this, { key: name, meta, columns, events: meta.events });
    this.kind = columns.kind;
    this.lanes = {};
    for (const what of WHATS) this.lanes[what] = this.laneOf(what);
    this.lanes.transfer.id = columns["copy.id"];
    this.requests = meta.requests;
    this.kindAt = Object.fromEntries(meta.kinds.map((kind, at) => [kind, at]));
    this.uses = Object.fromEntries(WHATS.map((what) => [what, this.statesOf(what)]));
    this.axes = { seq: seqAxis(this), step: stepAxis(this) };
    this.rows = lanesInFlight(this);
    this.counts = { block: countStates(this, "block"), page: countStates(this, "page") };
    this.chunks = new Map();
    const node = document.getElementById(`${name}-texts`);
    this.textLines = node.textContent;
    node.remove();
    this.textAt = new Float64Array(columns.texts.length + 1);
    columns.texts.forEach((n, i) => {
      this.textAt[i + 1] = this.textAt[i] + n + 1;
    });
  }

  laneOf(what) {
    const c = this.columns,
      of = (name) => c[`${what}.${name}`];
    const births = {
      first: of("births"),
      at: of("birth_at"),
      role: of("birth_role"),
      row: of("birth_row"),
      entry: of("birth_entry"),
    };
    const first = of("first"),
      count = first.length - 1;
    let used = count; // ids above are in no event
    while (used > 1 && first[used - 1] === first[count]) used--;
    return {
      what,
      first,
      at: of("at"),
      state: of("state"),
      births,
      count,
      used,
      names: this.meta.states[what],
    };
  }

  // -- places, seqs, steps ---------------------------------------------------------------------
  seqOf(at) {
    const seqs = this.meta.seqs;
    let i = seqs.length - 1;
    while (i > 0 && seqs[i][0] > at) i--;
    return seqs.length ? seqs[i][1] + at - seqs[i][0] : 0;
  }

  // The place of the last event at or before `seq`; -1 before the first.
  placeOf(seq) {
    const seqs = this.meta.seqs;
    for (let i = seqs.length - 1; i >= 0; i--) {
      const end = i + 1 < seqs.length ? seqs[i + 1][0] : this.events;
      if (seqs[i][1] <= seq) return Math.min(seqs[i][0] + seq - seqs[i][1], end - 1);
    }
    return -1;
  }

  // The step that was planned last at `at`; 0 before the first.
  stepOf(at) {
    const i = lowerBound(this.columns["step.at"], at + 1) - 1;
    return i < 0 ? 0 : this.columns["step.number"][i];
  }

  placeOfStep(step) {
    const i = this.columns["step.number"].indexOf(step);
    return i < 0 ? -1 : this.columns["step.at"][i];
  }

  // Room on the axis behind the last event, for what cannot be read there.
  tail(axis) {
    const length = this.axes[axis][this.events] - this.axes[axis][0];
    return this.meta.lost ? Math.max(1, length / 20) : 0;
  }

  // Why no state is known at `at`, if so.
  unknownAt(at) {
    const gap = this.meta.gaps.find(({ from, to }) => from <= at && (to === null || at < to));
    return gap ? gap.reason : "";
  }

  // Stretches in which the log says nothing of states.
  holes(name) {
    const axis = this.axes[name],
      end = axis[this.events],
      found = this.meta.gaps.map((gap) => ({
        x0: gap.from ? axis[gap.from - 1] : axis[0],
        x1: gap.to === null ? end : axis[gap.to],
        text: gap.reason,
      }));
    if (this.meta.lost) found.push({ x0: end, x1: end + this.tail(name), text: this.meta.lost });
    return found;
  }

  // The place of the last event at or left of `x`.
  placeAt(axis, x) {
    return Math.max(lowerBound(this.axes[axis], x + 1e-9, 0, this.events) - 1, 0);
  }

  // -- states ----------------------------------------------------------------------------------
  // Index into lane.at of the last entry of `id` at or before place `at`; -1 for none.
  entryAt(lane, id, at) {
    const first = lane.first[id],
      found = lowerBound(lane.at, at + 1, first, lane.first[id + 1]);
    return found > first ? found - 1 : -1;
  }

  stateAt(what, id, at) {
    if (this.unknownAt(at)) return UNKNOWN;
    const lane = this.lanes[what],
      entry = this.entryAt(lane, id, at);
    return entry < 0 ? 0 : lane.state[entry] & STATE;
  }

  // States that an id is in at some time.
  statesOf(what) {
    const seen = new Uint8Array(16);
    for (const code of this.lanes[what].state) seen[code & STATE] = 1;
    return new Set([...seen.keys()].filter((state) => seen[state]));
  }

  // [index, state] of requests that have arrived by `at`; they are in order of arrival.
  requestsAt(at) {
    const { first, at: places, state } = this.lanes.request,
      found = [];
    for (let i = 0; i < this.requests.length && this.requests[i].arrived <= at; i++) {
      const last = first[i + 1] - 1; // most are over, and need no search
      const over = last >= first[i] && places[last] <= at && !(state[last] & STATE);
      found.push([i, over && !this.unknownAt(at) ? 0 : this.stateAt("request", i, at)]);
    }
    return found;
  }

  // The last birth of a block or page at or before `at`: its role, row, entry and epoch.
  birthAt(what, id, at) {
    const { first, at: places, role, row, entry } = this.lanes[what].births;
    const found = lowerBound(places, at + 1, first[id], first[id + 1]) - 1;
    if (found < first[id]) return null;
    return {
      at: places[found],
      role: this.meta.roles[role[found]],
      row: row[found],
      entry: entry[found],
    };
  }

  // The epoch is raised at every reservation.
  epochAt(what, id, at) {
    const { first, at: places } = this.lanes[what].births;
    return lowerBound(places, at + 1, first[id], first[id + 1]) - first[id];
  }

  // Which request held `row` at `at`; -1 for none.
  tenant(row, at) {
    let found = -1;
    this.requests.forEach((r, i) => {
      if (
        r.row === row &&
        r.admitted >= 0 &&
        r.admitted <= at &&
        (found < 0 || r.admitted > this.requests[found].admitted)
      )
        found = i;
    });
    return found;
  }

  // Rows of the sequence that steps planned for request `i` up to `at`.
  plannedOf(i, at) {
    const r = this.requests[i],
      c = this.columns;
    if (r.row < 0 || r.admitted > at) return 0;
    const low = lowerBound(c["work.row"], r.row),
      high = lowerBound(c["work.row"], r.row + 1);
    const found = lowerBound(c["work.at"], at + 1, low, high) - 1;
    if (found < low || c["work.at"][found] < r.admitted) return 0;
    return c["work.start"][found] + c["work.count"][found];
  }

  inFlightAt(at) {
    const { first, last, at: places, state, count } = this.rows;
    let found = 0;
    for (let row = 0; row < count; row++) {
      const e = lowerBound(places, at + 1, first[row], last[row]) - 1;
      if (e >= first[row] && (state[e] & STATE) !== 0) found++;
    }
    return found;
  }

  // Ids in each state after the event at `at`.
  countsAt(what, at) {
    const { every, points, begin, moves } = this.counts[what];
    const point = Math.floor((at + 1) / every),
      now = points.slice(point * 16, point * 16 + 16);
    for (let m = begin[point * every]; m < begin[at + 1]; m++) {
      now[moves[m] >> 4]--;
      now[moves[m] & 15]++;
    }
    return now;
  }

  // -- texts -----------------------------------------------------------------------------------
  // [fields, words] of the event at `at`, as the command line says them.
  async textOf(at) {
    const chunk = at >> 10;
    if (!this.chunks.has(chunk)) {
      const line = this.textLines.slice(this.textAt[chunk], this.textAt[chunk + 1] - 1);
      const rows = inflate(line).then((bytes) => JSON.parse(new TextDecoder().decode(bytes)));
      this.chunks.set(chunk, rows);
    }
    return (await this.chunks.get(chunk))[at & 1023];
  }

  // The lane of an id as people write it; of a request the epoch that arrived last up to `at`.
  idOf(what, ident, at) {
    if (what === "transfer") return this.columns["copy.id"].indexOf(Number(ident));
    if (what !== "request") return /^\d+$/.test(ident) ? Number(ident) : -1;
    let found = -1;
    this.requests.forEach((r, i) => {
      if (r.arrived <= at && (r.name === ident || `${r.name}/${r.epoch}` === ident)) found = i;
    });
    return found;
  }

  rowOf(copy) {
    return this.rowsOf[copy];
  }

  nameOf(what, id) {
    if (what === "request") return `request ${this.requests[id].name}/${this.requests[id].epoch}`;
    if (what === "transfer") return `transfer ${this.columns["copy.id"][id]}`;
    return what === "page" ? `host page ${id}` : `block ${id}`;
  }
}
