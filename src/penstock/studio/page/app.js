// The page: the setting, what is asked of the library, and what is shown of its answers.
import { CostBars, Comparison, MemoryPlot } from "./charts.js";
import { OPS, formatNumber, formatShare, formatTime, packIdle, packLanes } from "./data.js";
import { Engine } from "./engine.js";
import { LaneView, causeColours } from "./lanes.js";
import { Lesson } from "./learn.js";
import { PRESETS } from "./presets.js";
import { decode, download, encode } from "./share.js";

const $ = (id) => document.getElementById(id);
const MAX_FILE = 32 * 2 ** 20, MAX_BARS = 48, AUTO_COMPARE = 640, AUTO_FIT = 64;
const HINT = "Each row is a rank, with one device. Time runs from left to right, and the number in a box is its micro-batch. Point at a box to see what it needs and gives.";
const CAUSE_NAMES = { fill: "fill", drain: "drain", wait: "waits for a message", order: "held back by the order", memory: "memory cap" };

// In a frame of another page (`?embed`), Python waits until somebody uses the studio.
const embedded = new URLSearchParams(location.search).has("embed");
const engine = new Engine({ wait: embedded });
const lanes = new LaneView($("lanes"));
const memory = new MemoryPlot($("memory-plot"), lanes);
const bars = new CostBars($("bars"), (profile, done) => change({ profile }, { coalesce: !done }));
const comparison = new Comparison({ scatter: $("scatter"), table: $("table"), bound: $("bound"), change: $("change") }, chooseSchedule);

let catalog = null, setting = {}, answer = null, measured = null;
let history_ = [], future = [], coalescing = false, compared = "", rows = [], requestNumber = 0, pending = false;

// ---- the setting ---------------------------------------------------------------------------

/** Changes the setting, remembers the old one for undo, and asks for the new timeline. */
function change(patch, { coalesce = false, remember = true } = {}) {
  const next = { ...setting, ...patch };
  if (JSON.stringify(next) === JSON.stringify(setting) && !measured) { if (!coalesce) coalescing = false; return Promise.resolve(); }
  if (remember && !coalescing) { history_.push(setting); future = []; if (history_.length > 200) history_.shift(); }
  coalescing = coalesce;
  setting = next;
  leaveMeasured();
  return refresh();
}

function undo() { step(history_, future); }
function redo() { step(future, history_); }
function step(from, to) {
  if (!from.length) return;
  to.push(setting);
  setting = from.pop();
  leaveMeasured();
  refresh();
}

/** The fields that differ from the defaults: what a link holds. */
function compact() {
  return Object.fromEntries(Object.entries(setting).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(catalog.defaults[name])));
}

function chooseSchedule(name) {
  if (name === "your own") return;
  const fit = name === "fit" || name === "fit, v", family = catalog.families.find((f) => f.name === name);
  const free = name === "fit" || family?.free;
  change({
    schedule: fit ? "fit" : name, placement: name === "fit, v" ? "v" : "loop", text: "",
    stages_per_rank: free ? setting.stages_per_rank : null,
    ...(setting.schedule === "text" && answer ? { ranks: answer.ranks, chunks: answer.chunks } : {}),
  });
}

function scheduleName() {
  if (setting.schedule === "text") return "your own";
  return setting.schedule === "fit" && setting.placement === "v" ? "fit, v" : setting.schedule;
}

// Fields with text that is not part of the setting yet.
const typing = new Set();
document.addEventListener("input", ({ target }) => typing.add(target));
document.addEventListener("change", ({ target }) => typing.delete(target), { capture: true });

function showControls() {
  const own = setting.schedule === "text", family = catalog.families.find((f) => f.name === setting.schedule);
  const free = !own && (setting.schedule === "fit" ? setting.placement === "loop" : family?.free);
  $("schedule").value = own ? "text" : setting.schedule;
  $("use").textContent = own ? "A schedule of your own. Export it as text, and Pipe(schedule=\"mine.txt\") runs it."
    : setting.schedule === "fit" ? "Made to measure for these costs, messages and this memory cap." : `${family?.use ?? ""} ${family ? `(${family.source})` : ""}`;
  const set = (id, value, disabled = false) => { if (!typing.has($(id))) $(id).value = value; $(id).disabled = disabled; };
  set("ranks", own ? answer?.ranks ?? "" : setting.ranks, own);
  set("chunks", own ? answer?.chunks ?? "" : setting.chunks, own);
  const stages = setting.stages_per_rank ?? (setting.schedule === "fit" ? (setting.placement === "v" ? 2 : 1) : family?.stages_per_rank ?? "");
  set("stages", own ? "" : stages, !free);
  set("placement", setting.placement, setting.schedule !== "fit");
  set("memory", setting.memory ?? "");
  set("checkpoint", setting.checkpoint, own);
  set("skips", setting.skips.map((pair) => pair.join(":")).join(", "));
  for (const name of ["F", "I", "W", "send"]) set(`cost-${name}`, setting[name]);
  $("undo").disabled = !history_.length;
  $("redo").disabled = !future.length;
  $("title").textContent = own ? "your own schedule" : scheduleName();
  $("edit").disabled = measured !== null || lesson.active;
}

// ---- asking --------------------------------------------------------------------------------

async function refresh() {
  showControls();
  writeFragment();
  const number = ++requestNumber;
  pending = true;
  const result = await engine.ask("timeline", { setting }, { key: "timeline", urgency: 10 });
  if (number === requestNumber) pending = false;
  if (!result || number !== requestNumber || measured) return;
  if (!result.ok) { showError(result.error); return; }
  hideError();
  showAnswer(result);
  compare();
}

function showAnswer(result, { preview = false } = {}) {
  answer = result;
  const pack = packLanes(result);
  lanes.show([{ pack, idle: packIdle(result), critical: result.critical, waits: result.waits, unit: result.unit }], { keepView: true });
  memory.show(result.memory ?? null, result.facts?.peak ?? null, setting.memory);
  $("caption").textContent = result.caption ?? (result.waits.length ? `${result.waits.length} ranks wait forever` : preview ? `makespan ${formatNumber(result.makespan)}` : "");
  showVerdict(result);
  showLegend(result);
  if (preview) return;
  if (!lanes.selected || lesson.active) $("detail").textContent = lesson.active ? "" : HINT;
  showControls();
  showBars(result);
  const choice = $("microbatch"), chosen = choice.value;
  if (choice.options.length !== result.chunks + 1) {
    choice.replaceChildren(new Option("all", ""), ...Array.from({ length: Math.min(result.chunks, 4096) }, (_, i) => new Option(String(i), String(i))));
    choice.value = Number(chosen) < result.chunks ? chosen : "";
    lanes.options.microbatch = choice.value === "" ? null : Number(choice.value);
  }
  $("lanes").setAttribute("aria-label", `Timeline of ${scheduleName()}: ${result.ranks} ranks, ${result.stages} stages, ${result.chunks} micro-batches. ${result.caption ?? "It must not run."}`);
}

function showVerdict(result) {
  const box = $("verdict");
  if (!result.problems.length) {
    box.hidden = setting.schedule !== "text";
    box.className = "message good";
    box.textContent = "Sound: it is complete, ends, and fits. Export it as text to run it.";
    return;
  }
  box.hidden = false;
  box.className = "message bad";
  const list = document.createElement("ul");
  list.append(...result.problems.slice(0, 12).map((problem) => Object.assign(document.createElement("li"), { textContent: problem })));
  const more = result.problems.length > 12 ? `and ${result.problems.length - 12} more` : "";
  const head = result.problems.every((problem) => /brings live memory/.test(problem)) ? "This schedule does not fit the memory cap:" : "This schedule must not run:";
  box.replaceChildren(head, list, more);
}

function showLegend(result) {
  const used = new Set(result.lanes.flatMap((lane) => [...new Set(lane.ops)]));
  const items = catalog.ops.filter(({ op }) => used.has(op)).map(({ name, shades }) => [shades[0], name]);
  const shared = new Set(result.placement).size < result.placement.length;
  if (shared && items.length) items.push([catalog.ops.find(({ op }) => used.has(op)).shades[1], "lighter: a rank's second stage"]);
  if (lanes.options.causes && result.idle_by_cause) {
    const whole = result.ranks * result.makespan || 1;
    catalog.idle_causes.forEach((cause, i) => {
      const share = result.idle_by_cause[cause] / whole;
      if (share > 0) items.push([causeColours(lanes.theme)[i], `idle, ${CAUSE_NAMES[cause]} ${formatShare(share)}`]);
    });
  }
  setLegend(items);
}

function setLegend(items) {
  $("legend").replaceChildren(...items.map(([colour, text]) => {
    const item = document.createElement("li"), swatch = document.createElement("i");
    swatch.style.background = colour;
    item.append(swatch, text);
    return item;
  }));
}

/** The bars show what the library made of the profile: the cost of each stage against an even one. */
function showBars(result) {
  if (!result.cost || bars.element.matches(":active")) return;
  const owned = new Map();
  for (const rank of result.placement) owned.set(rank, (owned.get(rank) ?? 0) + 1);
  const even = setting.F + setting.I + setting.W, stages = result.stages, count = Math.min(stages, MAX_BARS);
  bars.show(Array.from({ length: count }, (_, i) => {
    const s = Math.floor(i * stages / count);
    return (result.cost.F[s] + result.cost.I[s] + result.cost.W[s]) * owned.get(result.placement[s]) / even;
  }));
}

/** The part of the setting that all schedules are compared for. */
function comparedSetting() {
  const { schedule, placement, text, ...rest } = setting;
  if (schedule === "text" && answer) Object.assign(rest, { ranks: answer.ranks, chunks: answer.chunks, stages_per_rank: null });
  return rest;
}

async function compare(now = false) {
  const rest = comparedSetting(), key = JSON.stringify(rest), size = rest.ranks * rest.chunks, names = catalog.compared;
  const render = () => {
    const own = setting.schedule === "text" && answer?.facts ? [{ ...answer.facts, schedule: "your own" }] : [];
    comparison.show([...rows, ...own], scheduleName(), { lower: answer?.bound ?? null, cap: setting.memory });
  };
  if (key !== compared || now) {
    compared = key;
    rows = names.map((name) => ({ schedule: name }));
    engine.cancel("compare");
    const wanted = names.filter((name) => now || size <= (name.startsWith("fit") ? AUTO_FIT : AUTO_COMPARE));
    $("compare-now").hidden = wanted.length === names.length;
    for (const name of wanted) rows.find((row) => row.schedule === name).pending = true;
    render();
    for (const name of wanted) {
      const result = await engine.ask("compare", { setting: { ...rest }, names: [name] }, { key: "compare", urgency: -5 });
      if (compared !== key) return;
      if (result?.ok) rows = rows.map((row) => (row.schedule === name ? result.rows[0] : row));
      render();
    }
    return;
  }
  render();
}

// ---- messages ------------------------------------------------------------------------------

function showError(text) {
  const close = Object.assign(document.createElement("button"), { type: "button", className: "dismiss", textContent: "✕" });
  close.setAttribute("aria-label", "Dismiss");
  close.addEventListener("click", hideError);
  $("error").replaceChildren(close, text.slice(0, 3000));
  $("error").hidden = false;
}
function hideError() { $("error").hidden = true; }

let busyTimer = 0;
engine.addEventListener("state", ({ detail: { state, text } }) => {
  clearTimeout(busyTimer);
  const put = (name, words) => { $("state").dataset.state = name; $("state-text").textContent = words; };
  $("stop").hidden = true;
  if (state === "starting") put("busy", "starting Python…");
  if (state === "ready") put("ready", "ready");
  if (state === "failed") { put("failed", "Python did not start"); showError(`Python did not start in this browser: ${text}`); }
  if (state === "busy") {
    busyTimer = setTimeout(() => {
      put("busy", text === "compare" ? "comparing…" : "computing…");
      busyTimer = setTimeout(() => { $("stop").hidden = false; }, 1500);
    }, 250);
  }
});
$("stop").addEventListener("click", () => {
  const unfinished = pending;
  engine.stop();
  if (unfinished) undo();
});

// ---- one action ----------------------------------------------------------------------------

function describe(place, { announce = false } = {}) {
  const { pack, unit } = lanes.bands[place.band ?? 0], at = pack.first[place.rank] + place.position;
  const op = catalog.ops.find(({ op }) => op === OPS[pack.op[at]]);
  const times = pack.ghost[at] ? "never runs" : `${formatTime(pack.start[at], unit)} to ${formatTime(pack.end[at], unit)}`;
  const text = `${lanes.describe(place)}: ${op.name} of stage ${pack.stage[at]}, micro-batch ${pack.microbatch[at]}; rank ${place.rank}, ${times}`;
  if (announce) $("announce").textContent = text;
  return { text, name: lanes.describe(place), op: op.name, times, stage: pack.stage[at], microbatch: pack.microbatch[at] };
}

async function showDetail(place) {
  const box = $("detail");
  if (!place) { box.textContent = HINT; lanes.links = null; lanes.draw(); return; }
  if (measured || !answer?.facts || lanes.dragged) {
    box.textContent = describe(place).text;
    return;
  }
  const result = await engine.ask("action", { setting, rank: place.rank, position: place.position }, { key: "action", urgency: 8 });
  if (!result?.ok || measured || lanes.dragged) return;
  const current = lanes.hover?.position !== undefined ? lanes.hover : lanes.selected;
  if (!current || current.rank !== place.rank || current.position !== place.position) return;
  lanes.links = { place, needs: result.needs.map((n) => n.place).filter(([rank]) => rank !== place.rank), gives: result.gives.map((g) => g.place).filter(([rank]) => rank !== place.rank) };
  lanes.draw();
  const facts = [
    `runs from ${result.times}`,
    ...(result.earlier.length ? [`comes after ${result.earlier.map(([rank, position]) => lanes.describe({ rank, position })).join(" and ")}`] : []),
    result.needs.length ? `needs the output of ${stagesOf(result.needs, "source")}` : "needs no message",
    result.gives.length ? `gives its output to ${stagesOf(result.gives, "target")}` : "gives no message",
  ];
  const name = Object.assign(document.createElement("strong"), { textContent: result.name });
  const line = Object.assign(document.createElement("div"), { className: "facts", textContent: facts.join(" · ") });
  box.replaceChildren(name, ` ${result.sentence}`, line);
}

/** The stages at one end of messages, which are written as `source>target:micro-batch`. */
function stagesOf(messages, end) {
  const stages = new Set(messages.map(({ message }) => message.match(/(?<source>\d+)>(?<target>\d+)/).groups[end]));
  return `stage ${[...stages].join(" and ")}`;
}

function idleText(place) {
  const { idle, unit } = lanes.bands[place.band], i = place.idle, cause = catalog.idle_causes[idle.cause[i]];
  const length = formatTime(idle.end[i] - idle.start[i], unit), blocker = idle.blockers[i];
  const other = blocker ? lanes.describe({ rank: blocker[0], position: blocker[1], band: place.band }) : "";
  return {
    fill: `${length} until the first micro-batch arrives`,
    drain: `${length} after the last action of this rank`,
    wait: blocker ? `${length}: waits for ${other} on rank ${blocker[0]}` : `${length}: waits`,
    order: `${length}: ${other} was ready, but comes later in this lane`,
    memory: `${length}: ${other} was ready, but memory is at its cap`,
  }[cause];
}

function showTooltip(place, x, y) {
  const tip = $("tooltip");
  if (!place) { tip.hidden = true; return; }
  const head = document.createElement("strong"), line = document.createElement("div");
  if (place.position === undefined) {
    head.textContent = "idle";
    tip.replaceChildren(head, idleText(place));
  } else {
    const facts = describe(place), ratios = lanes.bands[place.band].ratios;
    head.textContent = facts.name;
    line.textContent = `stage ${facts.stage}, micro-batch ${facts.microbatch} · ${facts.times}`;
    tip.replaceChildren(head, facts.op, line);
    if (ratios) {
      const { pack } = lanes.bands[place.band], ratio = ratios[pack.first[place.rank] + place.position];
      line.textContent += ` · ${formatNumber(ratio)} × the planned time`;
    }
  }
  tip.hidden = false;
  const frame = lanes.canvas.parentElement.getBoundingClientRect(), box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, frame.width - box.width - 6))}px`;
  tip.style.top = `${y + 22 + box.height > frame.height ? Math.max(2, y - box.height - 10) : y + 18}px`;
}

// ---- pointer and keyboard in the timeline --------------------------------------------------

const pointers = new Map();
let gesture = null;

function position(event) {
  const box = lanes.canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

lanes.canvas.addEventListener("pointerdown", (event) => {
  const [x, y] = position(event);
  pointers.set(event.pointerId, [x, y]);
  lanes.canvas.setPointerCapture(event.pointerId);
  if (pointers.size === 2) {
    const [a, b] = [...pointers.values()];
    gesture = { kind: "pinch", distance: Math.hypot(a[0] - b[0], a[1] - b[1]) };
    return;
  }
  const place = lanes.at(x, y), editable = place?.position !== undefined && !measured && answer && lessonOff();
  gesture = { kind: editable && $("edit").getAttribute("aria-pressed") === "true" ? "edit" : "pan", x, y, place, moved: false };
});

lanes.canvas.addEventListener("pointermove", (event) => {
  const [x, y] = position(event);
  if (pointers.has(event.pointerId)) pointers.set(event.pointerId, [x, y]);
  if (gesture?.kind === "pinch" && pointers.size === 2) {
    const [a, b] = [...pointers.values()], distance = Math.hypot(a[0] - b[0], a[1] - b[1]);
    lanes.zoom(distance / gesture.distance, (a[0] + b[0]) / 2, (a[1] + b[1]) / 2, true);
    gesture.distance = distance;
    return;
  }
  if (gesture && (gesture.moved || Math.hypot(x - gesture.x, y - gesture.y) > 4)) {
    if (!gesture.moved) { gesture.moved = true; showTooltip(null); }
    if (gesture.kind === "pan") { lanes.pan(x - gesture.x, y - gesture.y); gesture.x = x; gesture.y = y; }
    if (gesture.kind === "edit") dragAction(x);
    return;
  }
  const place = lanes.at(x, y), before = lanes.hover;
  lanes.hover = place;
  showTooltip(place, x, y);
  lanes.canvas.style.cursor = place?.position !== undefined ? ($("edit").getAttribute("aria-pressed") === "true" ? "grab" : "pointer") : "default";
  if (place?.rank !== before?.rank || place?.position !== before?.position) {
    lanes.links = null;
    lanes.draw();
    if (place?.position !== undefined && lessonOff()) showDetail(place);
  }
});

function endGesture(event) {
  pointers.delete(event.pointerId);
  const ended = gesture;
  gesture = null;
  if (!ended) return;
  if (ended.kind === "edit" && ended.moved) { dropAction(); return; }
  if (!ended.moved && ended.kind !== "pinch") {
    lanes.selected = ended.place?.position !== undefined ? { ...ended.place } : null;
    showDetail(lanes.selected);
    lanes.draw();
  }
}
lanes.canvas.addEventListener("pointerup", endGesture);
lanes.canvas.addEventListener("pointercancel", (event) => { pointers.delete(event.pointerId); gesture = null; if (lanes.dragged) { lanes.dragged = null; refresh(); } });
lanes.canvas.addEventListener("pointerleave", () => { lanes.hover = null; showTooltip(null); lanes.links = null; lanes.draw(); if (lanes.selected && lessonOff()) showDetail(lanes.selected); });
lanes.canvas.addEventListener("wheel", (event) => {
  const [x, y] = position(event), pixels = event.deltaMode === 1 ? 30 : 1;
  const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  const fits = lanes.rows * lanes.view.row <= lanes.plotHeight + 1;
  if (fits && !sideways && !event.ctrlKey && !event.metaKey) return;  // the page itself scrolls
  event.preventDefault();
  if (event.ctrlKey || event.metaKey) lanes.zoom(Math.exp(-event.deltaY * pixels * 0.0025), x, y, true);
  else if (event.shiftKey) lanes.pan(-event.deltaY * pixels, 0);
  else lanes.pan(-event.deltaX * pixels, fits ? 0 : -event.deltaY * pixels);
}, { passive: false });

// ---- editing -------------------------------------------------------------------------------

let edit = null;  // {rank, source, target, base, result} while an action is dragged

function dragAction(x) {
  if (!edit) {
    const { rank, position: source } = gesture.place;
    edit = { rank, source, target: source, base: lanes.bands[0].pack, result: null };
    lanes.links = null;
  }
  const { base, rank, source } = edit, time = lanes.timeAt(x), from = base.first[rank];
  let target = 0;
  for (let i = 0; i < base.first[rank + 1] - from; i++) {
    if (i !== source && (base.start[from + i] + base.end[from + i]) / 2 < time) target++;
  }
  lanes.dragged = { rank, target: edit.result ? edit.target : source, x };
  if (target !== edit.target || !edit.result) requestEdit(target);
  lanes.draw();
}

async function requestEdit(target) {
  const current = edit;
  current.wanted = target;
  performance.mark("drag-asked");
  const result = await engine.ask("edit", { setting, move: { rank: current.rank, source: current.source, target } }, { key: "edit", urgency: 20 });
  if (!result || edit !== current || current.wanted !== target) return;
  if (!result.ok) { showError(result.error); return; }
  performance.measure("drag", "drag-asked");
  current.result = result;
  current.target = target;
  if (lanes.dragged) lanes.dragged.target = target;
  showAnswer(result, { preview: true });
}

async function dropAction() {
  const current = edit;
  lanes.dragged = null;
  if (!current) return;
  for (let i = 0; i < 200 && current.wanted !== undefined && current.wanted !== current.target; i++) await new Promise((done) => setTimeout(done, 10));
  edit = null;
  if (!current.result || current.target === current.source) { refresh(); return; }
  await change({ schedule: "text", text: current.result.text, skips: current.result.skips });
}

/** Moves the selected action by keyboard. */
async function nudge(step) {
  const place = lanes.selected;
  if (!place || measured || !lessonOff()) return;
  const { pack } = lanes.bands[0], target = place.position + step;
  if (target < 0 || target >= pack.first[place.rank + 1] - pack.first[place.rank]) return;
  const result = await engine.ask("edit", { setting, move: { rank: place.rank, source: place.position, target } }, { key: "edit", urgency: 20 });
  if (!result?.ok) { if (result) showError(result.error); return; }
  lanes.selected = { ...place, position: target };
  await change({ schedule: "text", text: result.text, skips: result.skips });
  $("announce").textContent = result.problems.length ? `Must not run: ${result.problems[0]}` : "Sound.";
}

lanes.canvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || !lanes.bands.length) return;
  const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  if (!arrows) return;
  event.preventDefault();
  if (event.altKey && arrows[0]) { nudge(arrows[0]); return; }
  const place = lanes.selected ?? { rank: 0, position: -1, band: 0 }, { pack } = lanes.bands[place.band];
  let { rank, position: at } = place;
  if (arrows[0] || at < 0) at = Math.max(0, Math.min(at + (arrows[0] || 1), pack.first[rank + 1] - pack.first[rank] - 1));
  if (arrows[1]) {
    const time = (pack.start[pack.first[rank] + at] + pack.end[pack.first[rank] + at]) / 2;
    rank = Math.max(0, Math.min(rank + arrows[1], pack.ranks - 1));
    at = 0;
    while (at < pack.first[rank + 1] - pack.first[rank] - 1 && pack.end[pack.first[rank] + at] <= time) at++;
  }
  if (pack.first[rank + 1] === pack.first[rank]) return;
  lanes.selected = { rank, position: at, band: place.band };
  lanes.hover = null;
  lanes.reveal(lanes.selected);
  describe(lanes.selected, { announce: true });
  showDetail(lanes.selected);
});

// ---- files ---------------------------------------------------------------------------------

async function openFiles(list) {
  // A plan comes second, whatever the order in which the two were chosen.
  const isPlan = (file) => /plan|forecast/i.test(file.name), texts = [];
  const files = [...list].slice(0, 2).sort((a, b) => isPlan(a) - isPlan(b));
  for (const file of files) {
    if (file.size > MAX_FILE) {
      showError(`${file.name.slice(0, 80)} has ${(file.size / 2 ** 20).toFixed(0)} MB. The studio reads files of up to ${MAX_FILE / 2 ** 20} MB.`);
      return;
    }
    try {
      texts.push(new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()));
    } catch {
      showError(`${file.name.slice(0, 80)} is not text. The studio reads schedules as text, and timelines that result.timeline.save wrote.`);
      return;
    }
  }
  await openTexts(texts, files[0]?.name ?? "");
}

async function openTexts(texts, name) {
  const kinds = [];
  for (const text of texts) {
    const result = await engine.ask("open", { text }, { urgency: 12 });
    if (!result) return;
    if (!result.ok) { showError(`${name ? name.slice(0, 80) + ": " : ""}${result.error}`); return; }
    kinds.push(result);
  }
  closeLesson();
  hideError();
  if (kinds[0].file === "plan") showPlan(kinds[0]);
  else if (kinds[0].file === "profile") await change({ ...catalog.defaults, ranks: kinds[0].ranks, profile: kinds[0].profile });
  else if (kinds[0].file === "schedule") await change({ schedule: "text", text: kinds[0].text, checkpoint: "never", skips: [] });
  else await showMeasured(texts[0], kinds[1]?.file === "timeline" ? texts[1] : null, name, kinds[0]);
}

/** A measured step below its plan. Of two files, the second is the plan. */
async function showMeasured(run, plan, name, file) {
  const result = await engine.ask("measured", { run, plan }, { key: "measured", urgency: 12 });
  if (!result) return;
  if (!result.ok) { showError(result.error); return; }
  measured = { run, plan };
  showControls();
  lanes.selected = null;
  const flat = Float64Array.from(result.ratios.flat());
  const band = (side, label, ratios) => ({ pack: packLanes(side), idle: packIdle(side), critical: side.critical, waits: [], unit: result.run.unit, label, ratios });
  lanes.show([band(result.plan, "plan", null), band(result.run, "run", flat)]);
  memory.show(result.run.memory, result.run.facts.peak, null);
  $("title").textContent = name || "a measured step";
  $("caption").textContent = `run: ${result.run.caption}`;
  $("verdict").hidden = true;
  const list = result.sentences.map((sentence) => Object.assign(document.createElement("div"), { textContent: sentence }));
  $("run-sentences").replaceChildren(closeButton("Close the run"), ...list, reuseButton(file, "Compare all schedules with the costs of this run"));
  $("run-sentences").hidden = false;
  setLegend([["#cb372a", "took longer than planned"], [lanes.theme === "dark" ? "#4a5463" : "#bec5d0", "as planned"], ["#2471c4", "took less"], ...catalog.ops.filter(({ op }) => result.plan.lanes.some((lane) => lane.ops.includes(op))).map(({ shades, name: op }) => [shades[0], `plan: ${op}`])]);
  $("detail").textContent = "Point at a box of the run to see how long it took against the plan.";
}

/** A saved plan: its forecast, and its text, which ends with the certificate. */
function showPlan(plan) {
  measured = { plan };
  showControls();
  lanes.selected = null;
  const { timeline } = plan;
  lanes.show([{ pack: packLanes(timeline), idle: packIdle(timeline), critical: timeline.critical, waits: [], unit: timeline.unit }]);
  memory.show(timeline.memory, timeline.facts.peak, plan.caps, plan.peaks);
  $("title").textContent = plan.title;
  $("caption").textContent = timeline.caption;
  $("verdict").hidden = true;
  showLegend(timeline);
  $("detail").textContent = HINT;
  const report = Object.assign(document.createElement("pre"), { textContent: plan.report });
  $("run-sentences").replaceChildren(closeButton("Close the plan"), report, reuseButton(plan, "Compare all schedules with the costs of this plan"));
  $("run-sentences").hidden = false;
}

function closeButton(text) {
  const close = Object.assign(document.createElement("button"), { type: "button", className: "dismiss", textContent: text });
  close.addEventListener("click", () => { leaveMeasured(); refresh(); });
  return close;
}

function reuseButton({ ranks, chunks, profile }, text) {
  const reuse = Object.assign(document.createElement("button"), { type: "button", className: "link", textContent: text });
  reuse.addEventListener("click", () => change({ ...catalog.defaults, ranks, chunks, profile }));
  return reuse;
}

function leaveMeasured() {
  measured = null;
  $("run-sentences").hidden = true;
}

for (const type of ["dragenter", "dragover"]) {
  window.addEventListener(type, (event) => { event.preventDefault(); $("drop").hidden = false; });
}
window.addEventListener("dragleave", (event) => { if (!event.relatedTarget) $("drop").hidden = true; });
window.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").hidden = true;
  if (event.dataTransfer?.files.length) openFiles(event.dataTransfer.files);
});
$("open").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => { await openFiles($("file").files); $("file").value = ""; });

// ---- share and export ----------------------------------------------------------------------

const MAX_LINK = 500_000;  // characters; browsers cut longer addresses off
let written = "";

/** Puts the setting into the address. Returns false if it is too large for one. */
async function writeFragment() {
  const state = compact(), code = Object.keys(state).length ? await encode(state) : "";
  const fits = code.length <= MAX_LINK, shown = fits ? code : "";
  if (shown !== written) {
    written = shown;
    history.replaceState(null, "", `${location.pathname}${location.search}${shown ? "#" + shown : ""}`);
  }
  return fits;
}

async function readFragment() {
  const fragment = location.hash.slice(1);
  if (fragment === written) return false;
  try {
    const state = await decode(fragment);
    written = fragment;
    const known = Object.keys(catalog.defaults);
    const unknown = Object.keys(state ?? {}).find((name) => !known.includes(name));
    if (unknown !== undefined) throw new Error(`the link has an unknown field, ${unknown.slice(0, 40)}`);
    const next = { ...catalog.defaults, ...state };
    if (!Array.isArray(next.skips) || !next.skips.every(Array.isArray)) throw new Error("the link is damaged");
    if (setting.schedule) history_.push(setting);
    setting = next;
    leaveMeasured();
    await refresh();
    return true;
  } catch (error) {
    showError(`This link cannot be opened: ${error.message}.`);
    return false;
  }
}

/** The address of this view in a window of its own. */
function wholeAddress() { return `${location.origin}${location.pathname}${location.hash}`; }

async function share() {
  if (!await writeFragment()) {
    showError("This schedule is too large for a link. Export it as text, and send the file.");
    return;
  }
  let copied = true;
  try { await navigator.clipboard.writeText(wholeAddress()); } catch { copied = false; }
  const button = $("share"), words = copied ? "Link copied" : embedded ? "Not copied" : "Link is in the address bar";
  button.textContent = words;
  $("announce").textContent = words;
  setTimeout(() => { button.textContent = "Share"; }, 1800);
}

const TYPES = { text: ["txt", "text/plain"], svg: ["svg", "image/svg+xml"], perfetto: ["perfetto.json", "application/json"], timeline: ["timeline.json", "application/json"] };

async function exportAs(format) {
  const name = setting.schedule === "text" ? "mine" : `${scheduleName().replace(/\W+/g, "-")}-${setting.ranks}x${setting.chunks}`;
  if (format === "png") {
    const sheet = document.createElement("canvas"), [top, below] = [lanes.canvas, memory.canvas];
    sheet.width = top.width;
    sheet.height = top.height + below.height;
    const context = sheet.getContext("2d");
    context.drawImage(top, 0, 0);
    context.drawImage(below, 0, top.height);
    sheet.toBlob((blob) => download(`${name}.png`, blob));
    return;
  }
  const result = await engine.ask("export", { setting, format }, { urgency: 9 });
  if (!result) return;
  if (!result.ok) { showError(result.error); return; }
  download(`${name}.${TYPES[format][0]}`, result.content, TYPES[format][1]);
}

// ---- controls ------------------------------------------------------------------------------

function wireNumber(id, field, { whole = false, empty = undefined } = {}) {
  $(id).addEventListener("change", () => {
    const raw = $(id).value.trim(), value = raw === "" ? empty : Number(raw);
    const bad = value === undefined || (value !== empty && (!Number.isFinite(value) || (whole && !Number.isInteger(value))));
    $(id).setAttribute("aria-invalid", String(bad));
    if (bad) showError(`'${raw.slice(0, 40)}' is not a ${whole ? "whole " : ""}number.`);
    else change({ [field]: value });
  });
}
wireNumber("ranks", "ranks", { whole: true });
wireNumber("chunks", "chunks", { whole: true });
wireNumber("stages", "stages_per_rank", { whole: true, empty: null });
wireNumber("memory", "memory", { empty: null });
for (const name of ["F", "I", "W", "send"]) wireNumber(`cost-${name}`, name);
$("placement").addEventListener("change", () => change({ placement: $("placement").value, stages_per_rank: null }));
$("checkpoint").addEventListener("change", () => change({ checkpoint: $("checkpoint").value }));
$("schedule").addEventListener("change", () => chooseSchedule($("schedule").value));
$("even").addEventListener("click", () => change({ profile: [] }));
$("skips").addEventListener("change", () => {
  const words = $("skips").value.split(/[\s,;]+/).filter(Boolean), pairs = words.map((word) => word.match(/^(\d{1,6}):(\d{1,6})$/));
  $("skips").setAttribute("aria-invalid", String(pairs.includes(null)));
  if (pairs.includes(null)) showError(`'${words[pairs.indexOf(null)].slice(0, 40)}' is not a skip: write SRC:DST, such as 0:3.`);
  else change({ skips: pairs.map((pair) => [Number(pair[1]), Number(pair[2])]) });
});
$("preset").addEventListener("change", () => {
  const [group, item] = $("preset").value.split(".").map(Number), chosen = PRESETS[group]?.[1][item];
  $("preset").value = "";
  if (chosen) { closeLesson(); change({ ...catalog.defaults, ...chosen[1] }); }
});
$("microbatch").addEventListener("change", () => { lanes.options.microbatch = $("microbatch").value === "" ? null : Number($("microbatch").value); lanes.draw(); });
$("compare-now").addEventListener("click", () => compare(true));

function toggle(id, apply) {
  $(id).addEventListener("click", () => {
    const on = $(id).getAttribute("aria-pressed") !== "true";
    $(id).setAttribute("aria-pressed", String(on));
    apply(on);
    lanes.draw();
  });
}
toggle("critical", (on) => { lanes.options.critical = on; });
toggle("causes", (on) => { lanes.options.causes = on; if (answer && !measured) showLegend(answer); });
toggle("edit", () => {});
$("zoom-in").addEventListener("click", () => lanes.zoom(1.5, undefined, undefined, true));
$("zoom-out").addEventListener("click", () => lanes.zoom(1 / 1.5, undefined, undefined, true));
$("fit-view").addEventListener("click", () => lanes.fit());
$("undo").addEventListener("click", undo);
$("redo").addEventListener("click", redo);
$("share").addEventListener("click", share);
$("help").addEventListener("click", () => $("keys").showModal());

const menu = $("export-menu");
function openMenu(open) {
  menu.hidden = !open;
  $("export").setAttribute("aria-expanded", String(open));
  if (open) menu.querySelector("button").focus();
}
$("export").addEventListener("click", () => openMenu(menu.hidden));
menu.addEventListener("click", (event) => {
  const format = event.target.closest("button")?.dataset.format;
  if (format) { openMenu(false); $("export").focus(); exportAs(format); }
});
menu.addEventListener("keydown", (event) => {
  const items = [...menu.querySelectorAll("button")], at = items.indexOf(document.activeElement);
  const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (move) { event.preventDefault(); items[(at + move + items.length) % items.length].focus(); }
  if (event.key === "Escape") { openMenu(false); $("export").focus(); }
});
document.addEventListener("click", (event) => { if (!event.target.closest(".menu")) openMenuQuietly(); });
function openMenuQuietly() { menu.hidden = true; $("export").setAttribute("aria-expanded", "false"); }

// ---- the lesson ----------------------------------------------------------------------------

const lesson = new Lesson({
  chapters: $("chapters"), intro: $("lesson-intro"), text: $("lesson-text"), play: $("lesson-play"),
  next: $("lesson-next"), back: $("lesson-back"), slider: $("lesson-at"), count: $("lesson-count"),
}, { engine, lanes, load: (patch) => change({ ...catalog.defaults, ...patch }) });

function lessonOff() { return !lesson.active; }
function setMode(learn) {
  $("mode-learn").setAttribute("aria-pressed", String(learn));
  $("mode-explore").setAttribute("aria-pressed", String(!learn));
  $("lesson").hidden = !learn;
  if (learn) lesson.open(lesson.chapter); else lesson.close();
}
function closeLesson() { if (lesson.active) setMode(false); }
$("mode-learn").addEventListener("click", () => setMode(true));
$("mode-explore").addEventListener("click", () => setMode(false));

// ---- theme and keys ------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  lanes.theme = theme;
  if (answer && !measured && catalog) showLegend(answer);
  lanes.draw();
}
setTheme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => { if (!embedded) setTheme(dark.matches ? "dark" : "light"); });
$("theme").addEventListener("click", () => setTheme(lanes.theme === "dark" ? "light" : "dark"));

document.addEventListener("keydown", (event) => {
  const control = event.ctrlKey || event.metaKey;
  if (control && event.key.toLowerCase() === "z") { event.preventDefault(); if (event.shiftKey) redo(); else undo(); return; }
  if (control || event.altKey || event.target.closest("input, select, textarea, dialog, [role=slider]")) return;
  if (event.key === " " && lesson.active && !event.target.closest("button")) { event.preventDefault(); lesson.toggle(); return; }
  const click = { c: "critical", i: "causes", e: "edit", f: "fit-view", "+": "zoom-in", "=": "zoom-in", "-": "zoom-out", o: "open", s: "share", "?": "help" }[event.key.toLowerCase()];
  if (click) { event.preventDefault(); $(click).click(); }
  if (event.key.toLowerCase() === "l") setMode(!lesson.active);
});
if (embedded) {
  document.documentElement.dataset.embedded = "";
  $("state").dataset.state = "waiting";
  $("state-text").textContent = "starts when you use it";
  for (const type of ["pointerenter", "pointerdown", "focusin"]) {
    document.documentElement.addEventListener(type, () => engine.start(), { once: true });
  }
  $("whole").addEventListener("click", () => { $("whole").href = wholeAddress(); });
  // The page around the frame says which theme it has.
  window.addEventListener("message", ({ origin, data }) => {
    if (origin === location.origin && ["light", "dark"].includes(data?.theme)) setTheme(data.theme);
  });
  window.parent.postMessage({ studio: "loaded" }, location.origin);
}

document.querySelector(".skip-link").addEventListener("click", (event) => { event.preventDefault(); lanes.canvas.focus(); });
window.addEventListener("hashchange", () => { if (catalog) readFragment(); });

// ---- the start -----------------------------------------------------------------------------

function fillLists() {
  lanes.shades = Object.fromEntries(catalog.ops.map(({ op, shades }) => [op, shades]));
  $("schedule").replaceChildren(
    ...catalog.families.map(({ name }) => new Option(name, name)), new Option("fit", "fit"), Object.assign(new Option("your own", "text"), { disabled: true }));
  $("preset").append(...PRESETS.map(([label, items], group) => {
    const list = Object.assign(document.createElement("optgroup"), { label });
    list.append(...items.map(([name], item) => new Option(name, `${group}.${item}`)));
    return list;
  }));
}

async function start() {
  // The first answers were computed when the studio was built, by the same functions.
  const first = await fetch("./first.json").then((response) => response.json());
  catalog = first.catalog;
  fillLists();
  setting = { ...catalog.defaults };
  const opened = new URLSearchParams(location.search).has("open");
  if (location.hash.length > 1) {
    showControls();
    if (await readFragment()) return;
  }
  showControls();
  rows = first.compare.rows;
  compared = JSON.stringify(comparedSetting());
  showAnswer(first.timeline);
  performance.mark("first-picture");
  compare();
  if (opened) {
    const response = await fetch("./opened");
    if (response.ok) await openFiles([new File([await response.arrayBuffer()], "the file")]);
  }
}
start().catch((error) => showError(`The studio did not start: ${error.message}`));

// For tests in a browser.
window.studio = { engine, lanes, get setting() { return setting; }, get answer() { return answer; }, get measured() { return measured; }, openTexts };
