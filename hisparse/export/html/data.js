"use strict";
// The payload of a page, as `payload.py` writes it, and searches in what is in it.

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text),
    bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

async function inflate(text) {
  const stream = new Blob([fromBase64(text)]).stream();
  const raw = stream.pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(raw).arrayBuffer());
}

// The named arrays of the payload; uint32 arrays lie in four planes of bytes.
function unpackColumns(bytes) {
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  const columns = {};
  let at = 4 + length;
  for (const { name, form, length: n } of head.arrays) {
    if (form === "u8") {
      columns[name] = bytes.subarray(at, at + n);
      at += n;
      continue;
    }
    const found = new Uint32Array(n);
    const [a, b, c, d] = [at, at + n, at + 2 * n, at + 3 * n];
    let last = 0;
    const delta = form === "delta";
    for (let i = 0; i < n; i++) {
      const v = bytes[a + i] | (bytes[b + i] << 8) | (bytes[c + i] << 16) | (bytes[d + i] << 24);
      found[i] = delta ? (last = (last + v) | 0) : v;
    }
    columns[name] = found;
    at += 4 * n;
  }
  return [head.meta, columns];
}

// First index in [low, high) of an ascending array whose value is not below `value`.
function lowerBound(array, value, low = 0, high = array.length) {
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (array[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

// A heap of arrays, least first element on top.
function heapPush(heap, item) {
  let i = heap.push(item) - 1;
  while (i > 0) {
    const up = (i - 1) >> 1;
    if (heap[up][0] <= item[0]) break;
    heap[i] = heap[up];
    i = up;
  }
  heap[i] = item;
}

function heapPop(heap) {
  const top = heap[0],
    item = heap.pop();
  if (!heap.length) return top;
  let i = 0;
  for (;;) {
    let child = 2 * i + 1;
    if (child >= heap.length) break;
    if (child + 1 < heap.length && heap[child + 1][0] < heap[child][0]) child++;
    if (heap[child][0] >= item[0]) break;
    heap[i] = heap[child];
    i = child;
  }
  heap[i] = item;
  return top;
}
