// The timeline on a canvas. Large boxes are drawn one by one; where an action is narrower than a few
// pixels, every pixel is looked up instead, so the work depends on the window and not on the schedule.
import { OPS, actionName, findAction } from "./data.js";

const GUTTER = 62, AXIS = 24, MIN_ROW = 0.25, MAX_ROW = 42;
const CAUSE_COLOURS = {
  light: ["#dfe3ea", "#e9e4dc", "#f6d9d3", "#f7ebc9", "#e6d8f0"],
  dark: ["#2d3747", "#3d362d", "#5a302d", "#514525", "#443059"],
};
const THEMES = {
  light: { surface: "#ffffff", idle: "#eef0f3", ink: "#1d2430", faint: "#5b6472", grid: "#dfe3e8", bad: "#c62828", accent: "#1d2430", gap: "#ffffff" },
  dark: { surface: "#171c25", idle: "#222934", ink: "#e7ebf1", faint: "#9aa5b5", grid: "#29313d", bad: "#ff8a80", accent: "#ffffff", gap: "#171c25" },
};

export function causeColours(theme) { return CAUSE_COLOURS[theme]; }

function toPixel(hex, mix = null, share = 0) {
  const parts = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const other = mix ? [1, 3, 5].map((i) => parseInt(mix.slice(i, i + 2), 16)) : parts;
  const [r, g, b] = parts.map((part, i) => Math.round(part * (1 - share) + other[i] * share));
  return (255 << 24) | (b << 16) | (g << 8) | r;  // little endian: ABGR
}

/** Black or white, whichever reads better on a colour, as `contrasting_ink` of draw/style.py. */
export function inkOn(hex) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000000" : "#ffffff";
}

/** Red where a run took longer than planned, blue where it took less, grey where it agrees. */
function ratioColour(ratio, theme) {
  const amount = Math.max(-1, Math.min(1, Math.log2(Math.max(ratio, 1e-3)) / Math.log2(1.5)));
  const base = theme === "dark" ? [74, 84, 99] : [190, 197, 208];
  const far = amount > 0 ? [203, 55, 42] : [36, 113, 196];
  const mixed = base.map((part, i) => Math.round(part + (far[i] - part) * Math.abs(amount)));
  return "#" + mixed.map((part) => part.toString(16).padStart(2, "0")).join("");
}

export class LaneView extends EventTarget {
  constructor(canvas) {
    super();
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.theme = "light";
    this.shades = {};
    this.bands = [];  // one for a plan; two, plan and run, for a measured step
    this.view = { time: 0, scale: 1, top: 0, row: 24 };
    this.options = { causes: true, critical: false, microbatch: null, until: null };
    this.hover = null;
    this.selected = null;
    this.links = null;
    this.dragged = null;
    this.height = 320;
    this.frame = 0;
    this.fitted = true;
    new ResizeObserver(() => this.resize()).observe(canvas.parentElement);
  }

  /** Shows one band {pack, idle, critical, waits, label, unit, ratios}, or several with the same ranks. */
  show(bands, { keepView = false } = {}) {
    const before = this.bands[0]?.pack;
    this.bands = bands;
    const pack = bands[0].pack;
    const same = before && before.ranks === pack.ranks && this.rows === bands.length * pack.ranks;
    this.rows = bands.reduce((sum, band) => sum + band.pack.ranks + (bands.length > 1 ? 1 : 0), 0);
    if (this.selected && !this.#exists(this.selected)) this.selected = null;
    this.hover = this.hover && this.#exists(this.hover) ? this.hover : null;
    this.links = null;
    this.#setHeight();
    if (!keepView || !same || this.fitted) this.fit(); else this.#clamp();
    this.draw();
  }

  #exists(place) {
    const pack = this.bands[place.band ?? 0]?.pack;
    return pack && place.rank < pack.ranks && pack.first[place.rank] + place.position < pack.first[place.rank + 1];
  }

  #setHeight() {
    const most = Math.max(300, Math.min(window.innerHeight * 0.56, 760));
    this.height = Math.round(Math.min(most, AXIS + this.rows * 44 + 8));
    this.canvas.style.height = `${this.height}px`;
    this.resize(false);
  }

  resize(draw = true) {
    const width = this.canvas.parentElement.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!width) return;
    this.width = width;
    this.ratio = ratio;
    const w = Math.round(width * ratio), h = Math.round(this.height * ratio);
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w;
      this.canvas.height = h;
      this.image = null;
    }
    if (draw && this.bands.length) { if (this.fitted) this.fit(); this.draw(); }
  }

  get plotWidth() { return Math.max(40, this.width - GUTTER - 10); }
  get plotHeight() { return this.height - AXIS; }
  get ends() { return Math.max(...this.bands.map((band) => band.pack.ends)); }

  fit() {
    if (!this.bands.length || !this.width) return;
    this.view = {
      time: 0, scale: this.plotWidth / this.ends, top: 0,
      row: Math.max(MIN_ROW, Math.min(MAX_ROW, this.plotHeight / this.rows)),
    };
    this.fitted = true;
    this.#allowTouch();
    this.draw();
  }

  zoom(factor, x = GUTTER + this.plotWidth / 2, y = AXIS, both = false) {
    const time = this.timeAt(x), line = this.view.top + (y - AXIS) / this.view.row;
    const least = this.plotWidth / this.ends, most = least * Math.max(4, this.ends / this.#shortest() * 0.2);
    this.view.scale = Math.max(least, Math.min(most, this.view.scale * factor));
    this.view.time = time - (x - GUTTER) / this.view.scale;
    if (both) {
      this.view.row = Math.max(Math.min(MAX_ROW, this.plotHeight / this.rows), Math.min(MAX_ROW, this.view.row * factor));
      this.view.top = line - (y - AXIS) / this.view.row;
    }
    this.fitted = false;
    this.#clamp();
    this.draw();
  }

  #shortest() {
    const { pack } = this.bands[0];
    let least = Infinity;
    for (let i = 0; i < Math.min(pack.count, 2000); i++) {
      const length = pack.end[i] - pack.start[i];
      if (length > 0 && length < least) least = length;
    }
    return Number.isFinite(least) ? least : this.ends;
  }

  pan(dx, dy) {
    this.view.time -= dx / this.view.scale;
    this.view.top -= dy / this.view.row;
    this.fitted = false;
    this.#clamp();
    this.draw();
  }

  #clamp() {
    const { view } = this;
    view.scale = Math.max(view.scale, this.plotWidth / this.ends);
    view.time = Math.max(0, Math.min(view.time, this.ends - this.plotWidth / view.scale));
    view.top = Math.max(0, Math.min(view.top, this.rows - this.plotHeight / view.row));
    this.#allowTouch();
  }

  /** Where all ranks are in view, a finger that moves up or down scrolls the page. */
  #allowTouch() {
    this.canvas.style.touchAction = this.rows * this.view.row > this.plotHeight + 1 ? "none" : "pan-y";
  }

  timeAt(x) { return this.view.time + (x - GUTTER) / this.view.scale; }
  xOf(time) { return GUTTER + (time - this.view.time) * this.view.scale; }

  /** The row of a rank: the bands stand one below the other, each with a headline of one row. */
  rowOf(rank, band = 0) {
    if (this.bands.length === 1) return rank;
    let row = 1;
    for (let i = 0; i < band; i++) row += this.bands[i].pack.ranks + 1;
    return row + rank;
  }

  yOf(rank, band = 0) { return AXIS + (this.rowOf(rank, band) - this.view.top) * this.view.row; }

  /** The rank and band at a height, or null. */
  laneAt(y) {
    if (y < AXIS) return null;
    let row = Math.floor(this.view.top + (y - AXIS) / this.view.row);
    if (this.bands.length === 1) return row < this.bands[0].pack.ranks ? { rank: row, band: 0 } : null;
    for (let band = 0; band < this.bands.length; band++) {
      if (row === 0) return null;
      row -= 1;
      if (row < this.bands[band].pack.ranks) return { rank: row, band };
      row -= this.bands[band].pack.ranks;
    }
    return null;
  }

  /** The action or idle time at a point, or null. */
  at(x, y) {
    const lane = this.laneAt(y);
    if (!lane || x < GUTTER) return null;
    const { pack, idle } = this.bands[lane.band], time = this.timeAt(x);
    const found = findAction(pack, lane.rank, time);
    if (found < pack.first[lane.rank + 1] && pack.start[found] <= time) {
      return { ...lane, position: found - pack.first[lane.rank] };
    }
    if (idle) {
      for (let i = idle.first[lane.rank]; i < idle.first[lane.rank + 1]; i++) {
        if (idle.start[i] <= time && time < idle.end[i]) return { ...lane, idle: i };
      }
    }
    return null;
  }

  boxOf({ rank, position, band = 0 }) {
    const { pack } = this.bands[band], at = pack.first[rank] + position;
    return { at, pack, x: this.xOf(pack.start[at]), y: this.yOf(rank, band), w: (pack.end[at] - pack.start[at]) * this.view.scale, h: this.view.row * 0.9 };
  }

  reveal(place) {
    const box = this.boxOf(place), { view } = this;
    if (box.x < GUTTER || box.x + box.w > this.width - 10) view.time = box.pack.start[box.at] - this.plotWidth / view.scale / 3;
    const row = this.rowOf(place.rank, place.band), shown = this.plotHeight / view.row;
    if (row < view.top || row + 1 > view.top + shown) view.top = row - shown / 2;
    this.#clamp();
    this.draw();
  }

  draw() {
    if (!this.frame) this.frame = requestAnimationFrame(() => { this.frame = 0; this.paint(); });
  }

  colour(band, at) {
    if (band.ratios) return ratioColour(band.ratios[at], this.theme);
    return this.shades[OPS[band.pack.op[at]]]?.[band.pack.shade[at]] ?? "#888888";
  }

  // ---- painting --------------------------------------------------------------------------

  paint(target = null) {
    if (!this.bands.length || !this.width) return;
    const context = target ?? this.context, look = THEMES[this.theme];
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.fillStyle = look.surface;
    context.fillRect(0, 0, this.width, this.height);
    const density = this.bands[0].pack.count / Math.max(1, this.bands[0].pack.ranks) / (this.ends * this.view.scale);
    this.coarse = density > 0.25 || this.view.row < 7;
    if (this.coarse) this.#paintPixels(context); else this.#paintBoxes(context, look);
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, this.width - GUTTER, this.plotHeight);
    context.clip();
    if (this.options.critical) this.#paintCritical(context, look);
    this.#paintWaits(context, look);
    this.#paintLinks(context, look);
    this.#paintSelection(context, look);
    this.#paintCursor(context, look);
    context.restore();
    this.#paintGutter(context, look);
    this.#paintAxis(context, look);
    this.dispatchEvent(new Event("paint"));
  }

  #visibleRanks(band) {
    const { pack } = this.bands[band];
    const from = Math.max(0, Math.floor(this.view.top - this.rowOf(0, band)));
    const to = Math.min(pack.ranks, Math.ceil(this.view.top + this.plotHeight / this.view.row - this.rowOf(0, band)));
    return [from, Math.max(from, to)];
  }

  #paintBoxes(context, look) {
    const { view, options } = this, height = view.row * 0.9, left = this.timeAt(GUTTER), right = this.timeAt(this.width);
    const causes = CAUSE_COLOURS[this.theme], gap = height > 9 ? 1 : 0, groups = new Map(), dimmed = new Map(), labels = [];
    const font = Math.min(13, height * 0.56);
    this.bands.forEach((band, number) => {
      const { pack, idle } = band, [from, to] = this.#visibleRanks(number);
      for (let rank = from; rank < to; rank++) {
        const y = this.yOf(rank, number);
        const end = Math.min(this.width, this.xOf(pack.ends));
        context.fillStyle = look.idle;
        context.fillRect(Math.max(GUTTER, this.xOf(0)), y, end - Math.max(GUTTER, this.xOf(0)), height);
        if (options.causes && idle && options.until === null) {
          for (let i = idle.first[rank]; i < idle.first[rank + 1]; i++) {
            if (idle.end[i] < left || idle.start[i] > right) continue;
            context.fillStyle = causes[idle.cause[i]];
            const x = Math.max(GUTTER, this.xOf(idle.start[i]));
            context.fillRect(x, y, this.xOf(idle.end[i]) - x, height);
          }
        }
        for (let at = findAction(pack, rank, left); at < pack.first[rank + 1] && pack.start[at] < right; at++) {
          if (options.until !== null && !options.until.has(at)) continue;
          const x = this.xOf(pack.start[at]), w = (pack.end[at] - pack.start[at]) * view.scale;
          if (w <= 0) continue;
          const dim = pack.ghost[at] || (options.microbatch !== null && pack.microbatch[at] !== options.microbatch);
          const colour = this.colour(band, at), group = dim ? dimmed : groups;
          if (!group.has(colour)) group.set(colour, []);
          group.get(colour).push(x, y, w - gap, height);
          const label = String(pack.microbatch[at]);
          if (font >= 6 && w > label.length * font * 0.62 + 4) labels.push(label, Math.max(x, GUTTER) / 2 + Math.min(x + w, this.width) / 2, y + height / 2, dim ? look.faint : inkOn(colour));
        }
      }
    });
    context.save();
    context.beginPath();
    context.rect(GUTTER, AXIS, this.width - GUTTER, this.plotHeight);
    context.clip();
    for (const [group, alpha] of [[dimmed, 0.28], [groups, 1]]) {
      context.globalAlpha = alpha;
      for (const [colour, boxes] of group) {
        context.fillStyle = colour;
        context.beginPath();
        for (let i = 0; i < boxes.length; i += 4) context.rect(boxes[i], boxes[i + 1], boxes[i + 2], boxes[i + 3]);
        context.fill();
      }
    }
    context.globalAlpha = 1;
    context.font = `500 ${font}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let i = 0; i < labels.length; i += 4) {
      context.fillStyle = labels[i + 3];
      context.fillText(labels[i], labels[i + 1], labels[i + 2] + 0.5);
    }
    context.restore();
  }

  /** Looks up the action below every pixel. One line of pixels is written for each row, then copied. */
  #paintPixels(context) {
    const { ratio, view, options } = this, look = THEMES[this.theme];
    const x0 = Math.round(GUTTER * ratio), y0 = Math.round(AXIS * ratio);
    const width = this.canvas.width - x0, height = this.canvas.height - y0;
    if (width <= 0 || height <= 0) return;
    if (!this.image || this.image.width !== width || this.image.height !== height) {
      this.image = new ImageData(width, height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    const { pixels } = this, surface = toPixel(look.surface), idleColour = toPixel(look.idle);
    const causes = CAUSE_COLOURS[this.theme].map((colour) => toPixel(colour));
    const palette = new Int32Array(4 * OPS.length);
    OPS.forEach((op, i) => {
      for (const shade of [0, 1]) {
        const colour = this.shades[op]?.[shade] ?? "#888888";
        palette[4 * i + shade] = toPixel(colour);
        palette[4 * i + 2 + shade] = toPixel(colour, look.surface, 0.78);
      }
    });
    const rowPixels = view.row * ratio, perPixel = 1 / (view.scale * ratio);
    let drawnRow = -1;
    for (let py = 0; py < height; py++) {
      const line = view.top + py / rowPixels, row = Math.floor(line), base = py * width;
      if (row === drawnRow && !(rowPixels >= 3 && line - row > 0.9)) {
        pixels.copyWithin(base, base - width, base);
        continue;
      }
      const lane = rowPixels >= 3 && line - row > 0.9 ? null : this.laneAt(AXIS + (py + 0.5) / ratio);
      if (!lane) { pixels.fill(surface, base, base + width); continue; }
      drawnRow = row;
      const band = this.bands[lane.band], { pack, idle } = band, last = pack.first[lane.rank + 1];
      let at = findAction(pack, lane.rank, view.time), gap = idle ? idle.first[lane.rank] : 0;
      const lastGap = idle ? idle.first[lane.rank + 1] : 0;
      for (let px = 0; px < width; px++) {
        const time = view.time + (px + 0.5) * perPixel;
        while (at < last && pack.end[at] <= time) at++;
        let colour = time > pack.ends ? surface : idleColour;
        if (at < last && pack.start[at] <= time && (options.until === null || options.until.has(at))) {
          const dim = pack.ghost[at] || (options.microbatch !== null && pack.microbatch[at] !== options.microbatch);
          colour = band.ratios ? toPixel(this.colour(band, at)) : palette[4 * pack.op[at] + pack.shade[at] + (dim ? 2 : 0)];
        } else if (idle && options.causes && options.until === null) {
          while (gap < lastGap && idle.end[gap] <= time) gap++;
          if (gap < lastGap && idle.start[gap] <= time) colour = causes[idle.cause[gap]];
        }
        pixels[base + px] = colour;
      }
    }
    context.putImageData(this.image, x0, y0);
  }

  #centre(place) {
    const box = this.boxOf(place);
    return [box.x + box.w / 2, box.y + box.h / 2, box];
  }

  #paintCritical(context, look) {
    this.bands.forEach((band, number) => {
      if (!band.critical?.length) return;
      context.strokeStyle = look.accent;
      context.lineJoin = "round";
      context.lineWidth = 2.2;
      context.beginPath();
      let before = null;
      for (const [rank, position] of band.critical) {
        const box = this.boxOf({ rank, position, band: number }), y = box.y + box.h / 2;
        if (this.coarse) {  // one line through the middle of the rows
          if (before) context.lineTo(box.x, y); else context.moveTo(box.x, y);
          context.lineTo(box.x + box.w, y);
        } else {  // outlines, joined where the path changes ranks
          if (before && before.y !== box.y) {
            const down = box.y > before.y;
            context.moveTo(before.x + before.w - 1, down ? before.y + before.h : before.y);
            context.lineTo(box.x + 1, down ? box.y : box.y + box.h);
          }
          if (box.y + box.h > AXIS && box.y < this.height) context.rect(box.x + 0.6, box.y + 1, Math.max(1, box.w - 2), box.h - 2);
        }
        before = box;
      }
      context.stroke();
    });
  }

  #arrow(context, from, to, colour, dashed = false) {
    const [x1, y1] = from, [x2, y2] = to, bend = Math.max(14, Math.abs(x2 - x1) / 2);
    context.strokeStyle = context.fillStyle = colour;
    context.setLineDash(dashed ? [5, 4] : []);
    context.beginPath();
    context.moveTo(x1, y1);
    context.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
    context.stroke();
    context.setLineDash([]);
    context.beginPath();
    context.moveTo(x2, y2);
    context.lineTo(x2 - 7, y2 - 4);
    context.lineTo(x2 - 7, y2 + 4);
    context.fill();
  }

  /** The cycle of a deadlock: each stuck action, and an arrow to what it waits for. */
  #paintWaits(context, look) {
    const { waits } = this.bands[0];
    if (!waits?.length) return;
    context.lineWidth = 2.2;
    for (const wait of waits) {
      const [x, y, box] = this.#centre(wait);
      context.strokeStyle = look.bad;
      context.strokeRect(box.x + 1, box.y + 1, Math.max(3, box.w - 3), box.h - 2);
      if (!wait.needs) continue;
      const [nx, ny] = this.#centre({ rank: wait.needs[0], position: wait.needs[1] });
      const bow = wait.needs[0] === wait.rank ? 24 : 0;
      context.beginPath();
      context.moveTo(x, y);
      context.quadraticCurveTo((x + nx) / 2 + (ny > y ? 18 : -18), (y + ny) / 2 - bow, nx, ny);
      context.stroke();
      const angle = Math.atan2(ny - (y + ny) / 2 + bow, nx - (x + nx) / 2 - (ny > y ? 18 : -18));
      context.fillStyle = look.bad;
      context.beginPath();
      context.moveTo(nx, ny);
      context.lineTo(nx - 10 * Math.cos(angle - 0.4), ny - 10 * Math.sin(angle - 0.4));
      context.lineTo(nx - 10 * Math.cos(angle + 0.4), ny - 10 * Math.sin(angle + 0.4));
      context.fill();
    }
  }

  #paintLinks(context, look) {
    if (!this.links) return;
    const { place, needs, gives } = this.links, box = this.boxOf(place);
    context.lineWidth = 1.7;
    for (const other of needs) {
      const from = this.boxOf({ rank: other[0], position: other[1], band: place.band });
      this.#arrow(context, [from.x + from.w, from.y + from.h / 2], [box.x, box.y + box.h / 2], look.ink);
    }
    for (const other of gives) {
      const to = this.boxOf({ rank: other[0], position: other[1], band: place.band });
      this.#arrow(context, [box.x + box.w, box.y + box.h / 2], [to.x, to.y + to.h / 2], look.faint, true);
    }
  }

  #paintSelection(context, look) {
    for (const [place, width] of [[this.hover, 1.5], [this.selected, 2.5]]) {
      if (!place || place.position === undefined) continue;
      const box = this.boxOf(place);
      context.strokeStyle = look.accent;
      context.lineWidth = width;
      context.strokeRect(box.x + 0.5, box.y + 0.5, Math.max(2, box.w - 1), Math.max(2, box.h - 1));
    }
    if (this.dragged) {
      const box = this.boxOf({ rank: this.dragged.rank, position: this.dragged.target }), band = this.bands[0];
      context.globalAlpha = 0.92;
      context.fillStyle = this.colour(band, box.at);
      context.fillRect(this.dragged.x - box.w / 2, box.y - 3, box.w, box.h + 6);
      context.globalAlpha = 1;
      context.strokeStyle = look.accent;
      context.lineWidth = 2;
      context.strokeRect(this.dragged.x - box.w / 2, box.y - 3, box.w, box.h + 6);
    }
  }

  #paintCursor(context, look) {
    if (this.options.cursor == null) return;
    const x = this.xOf(this.options.cursor);
    context.strokeStyle = look.bad;
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(x, AXIS);
    context.lineTo(x, this.height);
    context.stroke();
  }

  #paintGutter(context, look) {
    context.fillStyle = look.surface;
    context.fillRect(0, AXIS, GUTTER, this.plotHeight);
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = 2 ** Math.max(0, Math.ceil(Math.log2(15 / this.view.row)));
    this.bands.forEach((band, number) => {
      const [from, to] = this.#visibleRanks(number);
      for (let rank = Math.ceil(from / every) * every; rank < to; rank += every) {
        const y = this.yOf(rank, number) + Math.max(this.view.row, 1) * 0.45;
        if (y < AXIS + 5) continue;
        context.fillStyle = this.selected?.rank === rank || this.hover?.rank === rank ? look.ink : look.faint;
        context.fillText(band.pack.ranks > 100 ? String(rank) : `rank ${rank}`, GUTTER - 9, y);
      }
      if (this.bands.length > 1) {
        const y = this.yOf(0, number) - this.view.row / 2;
        if (y > AXIS) {
          context.fillStyle = look.ink;
          context.textAlign = "left";
          context.font = "600 12px system-ui, sans-serif";
          context.fillText(band.label, 8, y);
          context.font = "12px system-ui, sans-serif";
          context.textAlign = "right";
        }
      }
    });
  }

  #paintAxis(context, look) {
    const [perSecond, name] = this.bands[0].unit ?? [1, ""], shown = this.plotWidth / this.view.scale * perSecond;
    context.fillStyle = look.surface;
    context.fillRect(0, 0, this.width, AXIS);
    context.strokeStyle = look.grid;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(GUTTER, AXIS - 0.5);
    context.lineTo(this.width, AXIS - 0.5);
    const rough = shown / Math.max(2, this.plotWidth / 90), power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((m) => m * power).find((step) => step >= rough);
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = look.faint;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const first = Math.ceil(this.view.time * perSecond / tick);
    for (let i = first; i * tick <= (this.view.time * perSecond + shown) * 1.0001; i++) {
      const x = this.xOf(i * tick / perSecond);
      context.moveTo(x, AXIS - 5);
      context.lineTo(x, AXIS);
      const text = `${Number((i * tick).toPrecision(6))}${name ? " " + name : ""}`;
      context.fillText(text, Math.min(x, this.width - 22), AXIS / 2 - 1);
    }
    context.stroke();
    context.textAlign = "left";
    context.fillText("time", 10, AXIS / 2 - 1);
  }

  describe(place) {
    const { pack } = this.bands[place.band ?? 0];
    return actionName(pack, pack.first[place.rank] + place.position);
  }
}
