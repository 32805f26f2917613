// Answers of the library as typed arrays, so that a thousand ranks can be drawn in a few milliseconds.

export const OPS = ["F", "B", "I", "W", "R"];

/** The actions of all ranks, one after the other; those of rank r are from first[r] to first[r + 1]. */
export function packLanes(answer) {
  const lanes = answer.lanes, ranks = lanes.length;
  const first = new Uint32Array(ranks + 1);
  lanes.forEach((lane, rank) => { first[rank + 1] = first[rank] + lane.ops.length; });
  const count = first[ranks];
  const pack = {
    ranks, count, first, chunks: answer.chunks, placement: answer.placement,
    start: new Float64Array(count), end: new Float64Array(count), op: new Uint8Array(count),
    shade: new Uint8Array(count), stage: new Int32Array(count), microbatch: new Int32Array(count),
    ghost: new Uint8Array(count), makespan: answer.makespan, ends: 0,
  };
  const shades = stageShades(answer.placement);
  const usual = usualLength(lanes);
  lanes.forEach((lane, rank) => {
    let free = 0;
    for (let i = 0, at = first[rank]; i < lane.ops.length; i++, at++) {
      const ghost = lane.starts[i] === null;  // it never runs: drawn after all that does
      pack.start[at] = ghost ? Math.max(free, answer.makespan) : lane.starts[i];
      pack.end[at] = ghost ? pack.start[at] + usual : lane.ends[i];
      pack.ghost[at] = ghost ? 1 : 0;
      pack.op[at] = OPS.indexOf(lane.ops[i]);
      pack.stage[at] = lane.stages[i];
      pack.shade[at] = shades[lane.stages[i]] ?? 0;
      pack.microbatch[at] = lane.microbatches[i];
      free = pack.end[at];
    }
    pack.ends = Math.max(pack.ends, free);
  });
  pack.ends = pack.ends || 1;
  return pack;
}

/** 0 for a rank's first, third, ... stage, 1 for its second, fourth, ... one. */
export function stageShades(placement) {
  const owned = new Map();
  return placement.map((rank) => {
    owned.set(rank, (owned.get(rank) ?? -1) + 1);
    return owned.get(rank) % 2;
  });
}

function usualLength(lanes) {
  for (const lane of lanes) {
    for (let i = 0; i < lane.ops.length; i++) {
      if (lane.starts[i] !== null && lane.ends[i] > lane.starts[i]) return lane.ends[i] - lane.starts[i];
    }
  }
  return 1;
}

/** The first action of a rank that ends after a time. */
export function findAction(pack, rank, time) {
  let low = pack.first[rank], high = pack.first[rank + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (pack.end[middle] <= time) low = middle + 1; else high = middle;
  }
  return low;
}

export function actionName(pack, at) {
  return `${pack.stage[at]}${OPS[pack.op[at]]}${pack.microbatch[at]}`;
}

/** Idle times as typed arrays, those of rank r from first[r] to first[r + 1]. */
export function packIdle(answer) {
  const idle = answer.idle;
  if (!idle) return null;
  const first = new Uint32Array(answer.ranks + 1);
  for (const rank of idle.ranks) first[rank + 1]++;
  for (let rank = 0; rank < answer.ranks; rank++) first[rank + 1] += first[rank];
  return {
    first, start: Float64Array.from(idle.starts), end: Float64Array.from(idle.ends),
    cause: Uint8Array.from(idle.causes), blockers: idle.blockers,
  };
}

/** A number with four digits, as `format_number` of text_format.py writes it. */
export function formatNumber(value) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [factor, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= Math.max(factor, 9999.5)) return trim(value / factor) + letter;
  }
  return trim(value);
}

function trim(value) { return String(Number(value.toPrecision(4))); }

export function formatTime(seconds, unit) {
  return `${formatNumber(seconds * (unit?.[0] ?? 1))}${unit?.[1] ? " " + unit[1] : ""}`;
}

export function formatShare(share) { return `${(share * 100).toFixed(1)}%`; }
