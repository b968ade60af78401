"use strict";
// Why an id is as it is: the walk of `hisparse why` (fsm/why.py), over lanes instead of events.

const EVENTS_TOLD = 12,
  CAUSES_DEEP = 8,
  NEAR_EVENTS = 24;
const BIRTHS = {
  block: ["BlocksReserved", "HotLeased"],
  page: ["HostPagesReserved"],
  request: ["RequestArrived"],
  transfer: [],
};

// [{at, depth}], newest first; [] where nothing up to `at` names the id.
function explain(log, what, id, at) {
  const life = lifeOf(log, what, id, at);
  if (!life.length) return [];
  let told = life.slice(-EVENTS_TOLD);
  const written = what === "block" ? lastWrite(log, id, life[0], at) : -1;
  if (written >= 0) told = [...told, written].sort((a, b) => a - b);
  const links = [],
    seen = new Set();
  for (const place of told.reverse()) {
    for (const link of withCauses(log, place)) {
      if (seen.has(link.at)) continue;
      seen.add(link.at);
      links.push(link);
    }
  }
  return links;
}

// Places of the events since the id's epoch began that name it, or a copy out of or into it.
function lifeOf(log, what, id, at) {
  const lane = log.lanes[what],
    births = new Set(BIRTHS[what].map((kind) => log.kindAt[kind]));
  let own = named(lane, id, at);
  for (let i = own.length - 1; i >= 0; i--) {
    if (births.has(log.kind[own[i]])) {
      own = own.slice(i);
      break;
    }
  }
  if (what !== "block" && what !== "page") return own;
  const found = new Set(own),
    pinned = log.kindAt.TransferPinned;
  for (const place of own) {
    if (log.kind[place] !== pinned) continue;
    for (const copy of copiesAt(log, place, what, id))
      for (const other of named(log.lanes.transfer, copy, at)) if (other >= place) found.add(other);
  }
  return [...found].sort((a, b) => a - b);
}

function named(lane, id, at) {
  const places = [];
  for (let e = lane.first[id]; e < lane.first[id + 1] && lane.at[e] <= at; e++)
    if (lane.state[e] & NAMED) places.push(lane.at[e]);
  return places;
}

// Copies that the event at `place` planned out of or into the id: they lie together, by number.
function copiesAt(log, place, what, id) {
  const lane = log.lanes.transfer,
    ends = log.columns[`copy.${what}`],
    found = [];
  log.pinnedAt ??= pinnedBy(lane);
  for (const copy of log.pinnedAt.get(place) || []) if (ends[copy] === id) found.push(copy);
  return found;
}

function pinnedBy(lane) {
  const found = new Map();
  for (let copy = 0; copy < lane.count; copy++) {
    if (lane.first[copy] === lane.first[copy + 1]) continue;
    const place = lane.at[lane.first[copy]];
    if (!found.has(place)) found.set(place, []);
    found.get(place).push(copy);
  }
  return found;
}

// The last step planned in [from, at] that computes rows of the block's place; -1 for none.
function lastWrite(log, block, from, at) {
  const c = log.columns,
    births = log.lanes.block.births;
  let place = -1; // the reservation that says where the block is, as a table entry
  for (let i = births.first[block]; i < births.first[block + 1] && births.at[i] <= at; i++)
    if (log.kind[births.at[i]] === log.kindAt.BlocksReserved && births.at[i] >= from) place = i;
  if (place < 0) return -1;
  const role = log.meta.roles[births.role[place]],
    row = births.row[place];
  const pages = { RESIDENT: 1, INDEX: log.meta.index_pages }[role];
  if (pages === undefined) return -1;
  const size = log.meta.page_size * pages,
    low = births.entry[place] * size;
  const first = lowerBound(c["work.row"], row),
    last = lowerBound(c["work.row"], row + 1);
  for (let i = lowerBound(c["work.at"], at + 1, first, last) - 1; i >= first; i--) {
    if (c["work.at"][i] < from) return -1;
    const start = c["work.start"][i];
    if (start < low + size && start + c["work.count"][i] > low) return c["work.at"][i];
  }
  return -1;
}

function* withCauses(log, at) {
  for (let depth = 0; ; depth++) {
    yield { at, depth };
    if (log.kind[at] === log.kindAt.PolicyChosen) {
      const waiting = waitingNear(log, at);
      if (waiting >= 0) yield { at: waiting, depth: depth + 1 };
    }
    if (log.columns.cause[at] === 0 || depth === CAUSES_DEEP) return;
    at -= log.columns.cause[at];
  }
}

// The wait that a policy's choice led to: it has the same cause.
function waitingNear(log, at) {
  const cause = causeOf(log, at),
    end = Math.min(at + NEAR_EVENTS, log.events - 1);
  for (let next = at + 1; next <= end; next++)
    if (log.kind[next] === log.kindAt.AdmissionDeferred && causeOf(log, next) === cause)
      return next;
  return -1;
}

function causeOf(log, at) {
  return log.columns.cause[at] === 0 ? -1 : at - log.columns.cause[at];
}

// The chain with its words, as the command line prints it.
async function why(log, what, id, at) {
  const links = explain(log, what, id, at);
  return Promise.all(
    links.map(async (link) => {
      const [fields, text] = await log.textOf(link.at);
      const kind = log.meta.kinds[log.kind[link.at]];
      return { ...link, seq: log.seqOf(link.at), kind, fields, text };
    }),
  );
}
