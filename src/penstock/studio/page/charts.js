// The memory plot, the bars of costs, and the plot and table of all schedules.
import { formatNumber, formatShare } from "./data.js";

const GUTTER = 62;

// ---- memory --------------------------------------------------------------------------------

const LOOKS = {
  light: { surface: "#ffffff", fill: "#b9c3d3", line: "#5b6472", thin: "#cdd4de", ink: "#1d2430", faint: "#5b6472", bad: "#c62828", grid: "#dfe3e8" },
  dark: { surface: "#171c25", fill: "#3a475b", line: "#9aa5b5", thin: "#323c4a", ink: "#e7ebf1", faint: "#9aa5b5", bad: "#ff8a80", grid: "#29313d" },
};

export class MemoryPlot {
  constructor(canvas, lanes) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.lanes = lanes;
    this.curves = null;
    this.height = 132;
    lanes.addEventListener("paint", () => this.paint());
  }

  /** Shows the curves of all ranks. The cap is one for all ranks, one for each, or null. Peaks in bytes have texts. */
  show(curves, peaks, cap, texts = null) {
    Object.assign(this, { curves, peaks, caps: cap, texts });
    this.worst = peaks ? peaks.indexOf(Math.max(...peaks)) : 0;
    this.paint();
  }

  get cap() { return Array.isArray(this.caps) ? this.caps[this.rank] : this.caps; }

  get rank() {
    const chosen = this.lanes.hover?.rank ?? this.lanes.selected?.rank ?? this.worst;
    return chosen < (this.curves?.length ?? 0) ? chosen : 0;
  }

  paint() {
    const { lanes, height } = this, width = lanes.width, ratio = window.devicePixelRatio || 1, look = LOOKS[lanes.theme];
    if (!width) return;
    if (this.canvas.width !== Math.round(width * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = `${height}px`;
    }
    const context = this.context;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = look.surface;
    context.fillRect(0, 0, width, height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    if (!this.curves) {
      context.fillStyle = look.faint;
      context.textAlign = "left";
      context.fillText("Live activations are shown for a schedule that can run.", GUTTER, height / 2);
      return;
    }
    const { rank } = this, top = 26, base = height - 8;
    const most = Math.max(...this.peaks, this.cap ?? 0) * 1.06 || 1, y = (size) => base - (size / most) * (base - top);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width - GUTTER, height);
    context.clip();
    context.lineWidth = 1;
    if (this.curves.length <= 32) {
      context.strokeStyle = look.thin;
      this.curves.forEach((curve, other) => { if (other !== rank) { this.#trace(context, curve, y); context.stroke(); } });
    }
    this.#trace(context, this.curves[rank], y);
    context.strokeStyle = look.line;
    context.lineWidth = 1.4;
    context.stroke();
    context.lineTo(lanes.xOf(lanes.ends), base);
    context.lineTo(lanes.xOf(0), base);
    context.closePath();
    context.globalAlpha = 0.55;
    context.fillStyle = look.fill;
    context.fill();
    context.globalAlpha = 1;
    if (this.cap !== null && this.cap !== undefined) {
      context.strokeStyle = look.bad;
      context.setLineDash([6, 4]);
      context.beginPath();
      context.moveTo(GUTTER, y(this.cap));
      context.lineTo(width, y(this.cap));
      context.stroke();
      context.setLineDash([]);
    }
    context.restore();
    context.strokeStyle = look.grid;
    context.beginPath();
    context.moveTo(GUTTER, base + 0.5);
    context.lineTo(width, base + 0.5);
    context.stroke();
    context.fillStyle = look.faint;
    context.textAlign = "right";
    const peak = this.texts?.[rank] ?? formatNumber(this.peaks[rank]);
    if (this.peaks[rank] > 0) context.fillText(peak, GUTTER - 9, Math.max(top, y(this.peaks[rank])));
    context.fillText("0", GUTTER - 9, base - 4);
    context.textAlign = "left";
    context.fillStyle = look.ink;
    const against = this.cap === null || this.cap === undefined ? "" : this.texts ? `, ${formatShare(this.peaks[rank] / this.cap)} of what its cap leaves` : ` of ${formatNumber(this.cap)}`;
    const title = `live activations, rank ${rank}: peak ${peak}${against}`;
    context.fillText(title, GUTTER, 12);
    this.canvas.setAttribute("aria-label", `Memory: ${title}`);
  }

  #trace(context, curve, y) {
    const { lanes } = this;
    context.beginPath();
    let level = y(0), lastX = -1e9;
    context.moveTo(lanes.xOf(0), level);
    for (let i = 0; i < curve.times.length; i++) {
      const x = lanes.xOf(curve.times[i]), next = y(curve.sizes[i]);
      if (x < GUTTER - 4 && i + 1 < curve.times.length && lanes.xOf(curve.times[i + 1]) < GUTTER - 4) { level = next; continue; }
      if (x > lanes.width + 4) break;
      if (x - lastX > 0.3) context.lineTo(x, level);
      context.lineTo(x, next);
      level = next;
      lastX = x;
    }
    context.lineTo(Math.min(lanes.xOf(lanes.ends), lanes.width + 8), level);
  }
}

// ---- bars ----------------------------------------------------------------------------------

const MOST = 3;  // the factor at the top of a bar

/** Bars of relative costs, each a slider. `onChange(profile, done)` is called while one is dragged. */
export class CostBars {
  constructor(element, onChange) {
    this.element = element;
    this.onChange = onChange;
    this.profile = [];
    element.addEventListener("pointerdown", (event) => this.#drag(event));
    element.addEventListener("keydown", (event) => this.#key(event));
  }

  show(profile) {
    const { element } = this;
    this.profile = [...profile];
    element.style.gap = profile.length > 20 ? "1px" : "3px";
    while (element.children.length > profile.length) element.lastChild.remove();
    while (element.children.length < profile.length) {
      const bar = document.createElement("div");
      bar.className = "bar";
      bar.tabIndex = 0;
      bar.setAttribute("role", "slider");
      bar.setAttribute("aria-valuemin", "0");
      bar.setAttribute("aria-valuemax", String(MOST));
      bar.setAttribute("aria-orientation", "vertical");
      bar.append(document.createElement("i"), document.createElement("b"));
      element.append(bar);
    }
    profile.forEach((factor, i) => this.#render(i, factor));
  }

  #render(i, factor) {
    const bar = this.element.children[i];
    bar.firstChild.style.height = `${Math.min(100, factor / MOST * 100)}%`;
    bar.lastChild.textContent = this.profile.length <= 12 ? String(i) : "";
    bar.setAttribute("aria-label", `Cost of stage ${i}`);
    bar.setAttribute("aria-valuenow", factor.toFixed(2));
    bar.title = `${formatNumber(factor)} × the mean`;
  }

  #set(i, factor, done) {
    this.profile[i] = Math.round(Math.max(0.05, Math.min(MOST, factor)) * 20) / 20;
    this.#render(i, this.profile[i]);
    this.onChange([...this.profile], done);
  }

  #drag(event) {
    const bar = event.target.closest(".bar");
    if (!bar) return;
    event.preventDefault();
    bar.focus();
    const i = [...this.element.children].indexOf(bar), area = this.element.getBoundingClientRect();
    const move = (at) => (area.bottom - at.clientY) / area.height * MOST;
    bar.setPointerCapture(event.pointerId);
    this.#set(i, move(event), false);
    bar.onpointermove = (moved) => this.#set(i, move(moved), false);
    bar.onpointerup = bar.onpointercancel = (moved) => {
      bar.onpointermove = bar.onpointerup = bar.onpointercancel = null;
      this.#set(i, this.profile[i], true);
    };
  }

  #key(event) {
    const i = [...this.element.children].indexOf(event.target.closest(".bar"));
    const step = { ArrowUp: 0.1, ArrowRight: 0.1, ArrowDown: -0.1, ArrowLeft: -0.1 }[event.key];
    if (i < 0 || step === undefined) return;
    event.preventDefault();
    this.#set(i, this.profile[i] + step, true);
  }
}

// ---- all schedules -------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

function make(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

export class Comparison {
  constructor({ scatter, table, bound, change }, onChoose) {
    Object.assign(this, { scatter, body: table.tBodies[0], bound, change, onChoose });
    this.rows = [];
    this.current = null;
  }

  show(rows, current, { lower = null, cap = null } = {}) {
    Object.assign(this, { rows, lower, cap });
    this.current = rows.find((row) => row.schedule === current && !row.error) ?? null;
    this.#renderTable(current);
    this.#renderScatter(current);
    this.bound.textContent = lower === null ? "" : `With the stages placed like this, no order takes less than ${formatNumber(lower)}. Schedules that place them differently may.`;
  }

  #renderTable(current) {
    const sorted = [...this.rows].sort((a, b) => (a.makespan ?? 1e99) - (b.makespan ?? 1e99) || Math.max(...(a.peak ?? [0])) - Math.max(...(b.peak ?? [0])));
    this.body.replaceChildren(...sorted.map((row) => {
      const line = document.createElement("tr"), name = document.createElement("td"), button = document.createElement("button");
      button.type = "button";
      button.textContent = row.schedule;
      button.dataset.schedule = row.schedule;
      button.addEventListener("click", () => this.onChoose(row.schedule));
      name.append(button);
      line.append(name);
      const cells = row.error || row.makespan === undefined
        ? [row.error ? "not in this size" : row.pending ? "…" : "–", "", "", ""]
        : [formatNumber(row.makespan), formatShare(row.bubble), formatNumber(Math.max(...row.peak)), formatNumber(row.messages)];
      for (const text of cells) {
        const cell = document.createElement("td");
        cell.textContent = text;
        line.append(cell);
      }
      if (row.error) { line.className = "failed"; line.title = row.error; }
      if (row.fits === false) { line.className = "excess"; line.title = "needs more memory than the cap"; }
      if (row.schedule === current) { line.classList.add("current"); line.setAttribute("aria-current", "true"); }
      const tell = () => this.#tell(row);
      line.addEventListener("pointerenter", tell);
      button.addEventListener("focus", tell);
      line.addEventListener("pointerleave", () => { this.change.textContent = ""; });
      return line;
    }));
  }

  /** Says what changes if this row is chosen. */
  #tell(row) {
    const { current } = this;
    if (row.error) { this.change.textContent = row.error; return; }
    if (!current || current === row || row.makespan === undefined || current.makespan === undefined) { this.change.textContent = ""; return; }
    const time = row.makespan / current.makespan - 1, peak = Math.max(...row.peak) - Math.max(...current.peak);
    const parts = [
      Math.abs(time) < 5e-4 ? "the same time" : `${formatShare(Math.abs(time))} ${time < 0 ? "faster" : "slower"}`,
      Math.abs(peak) < 1e-9 ? "the same peak" : `peak ${peak > 0 ? "+" : "−"}${formatNumber(Math.abs(peak))}`,
      row.messages === current.messages ? "as many messages" : `${formatNumber(row.messages / Math.max(1, current.messages))} × the messages`,
    ];
    this.change.textContent = `${row.schedule} instead of ${current.schedule}: ${parts.join(", ")}.`;
  }

  #renderScatter(current) {
    const width = 308, height = 230, left = 40, bottom = 32, right = width - 10, top = 12;
    // Naive model parallelism is idle most of the time and would push all others to the bottom.
    const rows = this.rows.filter((row) => row.makespan !== undefined && !row.error && (row.schedule !== "naive" || current === "naive"));
    if (!rows.length) { this.scatter.replaceChildren(); return; }
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Idle time against peak memory of all schedules" });
    const peaks = rows.map((row) => Math.max(...row.peak));
    const mostX = Math.max(1, ...peaks, this.cap ?? 0) * 1.18, mostY = Math.max(0.05, ...rows.map((row) => row.bubble)) * 1.12;
    const x = (peak) => left + peak / mostX * (right - left), y = (bubble) => height - bottom - bubble / mostY * (height - bottom - top);
    svg.append(make("path", { class: "axis", d: `M${left} ${top}V${height - bottom}H${right}` }));
    for (const share of [0.5, 1]) {
      svg.append(make("text", { x: left - 5, y: y(mostY * share) + 4, "text-anchor": "end" }, `${(mostY * share * 100).toFixed(0)}%`));
      svg.append(make("text", { x: x(mostX * share), y: height - bottom + 13, "text-anchor": share === 1 ? "end" : "middle" }, formatNumber(mostX * share)));
    }
    svg.append(make("text", { x: left - 5, y: y(0) + 4, "text-anchor": "end" }, "0"));
    svg.append(make("text", { x: right, y: height - 4, "text-anchor": "end" }, "peak, in micro-batches"));
    svg.append(make("text", { x: left + 6, y: top + 2 }, "idle"));
    if (this.cap) svg.append(make("line", { class: "cap", x1: x(this.cap), x2: x(this.cap), y1: top, y2: height - bottom }));
    // Labels go where they cover neither a point nor another label; the table has those left out.
    const points = rows.map((row, i) => ({ row, peak: peaks[i], cx: x(peaks[i]), cy: y(row.bubble) }));
    points.sort((a, b) => (b.row.schedule === current) - (a.row.schedule === current) || a.row.bubble - b.row.bubble);
    let chosen = null;
    const taken = points.map(({ cx, cy }) => [cx - 5, cx + 5, cy - 5, cy + 5]);
    for (const { row, peak, cx, cy } of points) {
      const wide = row.schedule.length * 5.7, spots = [[cx + 8, cy + 3.5], [cx - 8 - wide, cy + 3.5], [cx - wide / 2, cy - 8], [cx - wide / 2, cy + 15]];
      const spot = spots.find(([lx, ly]) => lx > left && lx + wide < right + 8 && ly > top && ly < height - bottom + 2
        && taken.every((box) => lx > box[1] || lx + wide < box[0] || ly - 9 > box[3] || ly + 2 < box[2]));
      if (spot) {
        svg.append(make("text", { class: "name", x: spot[0], y: spot[1] }, row.schedule));
        taken.push([spot[0], spot[0] + wide, spot[1] - 9, spot[1] + 2]);
      }
      const name = row.schedule === current ? "current" : row.fits === false ? "excess" : "";
      const dot = make("circle", { cx, cy, r: row.schedule === current ? 5.5 : 4, class: name });
      dot.append(make("title", {}, `${row.schedule}: idle ${formatShare(row.bubble)}, peak ${formatNumber(peak)}`));
      dot.addEventListener("click", () => this.onChoose(row.schedule));
      if (name === "current") chosen = dot; else svg.append(dot);
    }
    if (chosen) svg.append(chosen);  // above those that it shares its place with
    this.scatter.replaceChildren(svg);
  }
}
