// The chapters of the lesson: from one rank at a time to no idle time. The library writes the sentence
// of each action; this module plays them.

export const CHAPTERS = [
  {
    name: "One at a time", setting: { schedule: "naive", ranks: 4, chunks: 4 },
    intro: "The model is too large for one device, so each of four ranks gets a quarter of its layers. But a rank can only work when the one before it is done. Three of four are always idle: this is naive model parallelism.",
  },
  {
    name: "GPipe", setting: { schedule: "gpipe", ranks: 4, chunks: 4 },
    intro: "Cut the batch into micro-batches. As soon as the first one leaves rank 0, rank 0 takes the second. All ranks work at the same time, except while the pipeline fills and drains. Every micro-batch stays in memory until its backward.",
  },
  {
    name: "1F1B", setting: { schedule: "1f1b", ranks: 4, chunks: 8 },
    intro: "One forward, one backward: a rank runs a backward as soon as there is one. The idle time is that of GPipe, but a micro-batch is freed early, so memory no longer grows with the number of micro-batches.",
  },
  {
    name: "Interleaved", setting: { schedule: "interleaved", ranks: 4, chunks: 8 },
    intro: "Give each rank two smaller stages (the lighter shade is the second). The first micro-batch reaches the last rank in half the time, so the pipeline fills and drains faster. The price: twice as many messages.",
  },
  {
    name: "Zero bubble", setting: { schedule: "zb-v", ranks: 4, chunks: 8 },
    intro: "Split the backward in two. Only the gradient of the inputs (I) is needed by the next rank; the gradient of the weights (W) can be computed at any time. Move it to where a rank would be idle, place the stages like a V, and the bubble is gone but for the skew between ranks.",
  },
];

export class Lesson {
  constructor(elements, { engine, lanes, load }) {
    Object.assign(this, { elements, engine, lanes, load });
    this.steps = [];
    this.at = 0;
    this.timer = 0;
    this.active = false;
    this.chapter = 0;
    const { chapters, play, next, back, slider } = elements;
    chapters.replaceChildren(...CHAPTERS.map((chapter, i) => {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("role", "tab");
      button.textContent = `${i + 1}. ${chapter.name}`;
      button.addEventListener("click", () => this.open(i));
      return button;
    }));
    play.addEventListener("click", () => this.toggle());
    next.addEventListener("click", () => { this.pause(); this.go(this.at + 1); });
    back.addEventListener("click", () => { this.pause(); this.go(this.at - 1); });
    slider.addEventListener("input", () => { this.pause(); this.go(Number(slider.value)); });
  }

  async open(chapter) {
    this.active = true;
    this.chapter = chapter;
    this.pause();
    const { elements } = this, { intro, setting } = CHAPTERS[chapter];
    [...elements.chapters.children].forEach((tab, i) => {
      tab.setAttribute("aria-selected", String(i === chapter));
      tab.tabIndex = i === chapter ? 0 : -1;
    });
    elements.intro.textContent = intro;
    elements.text.textContent = "";
    await this.load(setting);
    const answer = await this.engine.ask("lesson", { setting }, { key: "lesson", urgency: 5 });
    if (!answer?.ok || !this.active || this.chapter !== chapter) return;
    this.steps = answer.steps;
    elements.slider.max = String(this.steps.length);
    this.go(0);
  }

  /** Shows the first `at` actions. */
  go(at) {
    this.at = Math.max(0, Math.min(at, this.steps.length));
    const { elements, lanes } = this, pack = lanes.bands[0]?.pack, step = this.steps[this.at - 1];
    elements.slider.value = String(this.at);
    elements.count.textContent = `${this.at} / ${this.steps.length}`;
    elements.text.textContent = step?.sentence ?? "Press Play, or step through the actions one by one.";
    if (!pack) return;
    const shown = new Set(this.steps.slice(0, this.at).map(({ place }) => pack.first[place[0]] + place[1]));
    lanes.options.until = this.at === this.steps.length ? null : shown;
    lanes.selected = step && this.at < this.steps.length ? { rank: step.place[0], position: step.place[1], band: 0 } : null;
    lanes.options.cursor = step && this.at < this.steps.length ? pack.start[pack.first[step.place[0]] + step.place[1]] : null;
    lanes.draw();
    if (this.at === this.steps.length) this.pause();
  }

  toggle() {
    if (this.timer) { this.pause(); return; }
    if (this.at >= this.steps.length) this.go(0);
    const pace = Math.max(90, Math.min(650, 26000 / Math.max(1, this.steps.length)));
    this.timer = setInterval(() => this.go(this.at + 1), pace);
    this.elements.play.textContent = "Pause";
  }

  pause() {
    clearInterval(this.timer);
    this.timer = 0;
    this.elements.play.textContent = "Play";
  }

  close() {
    this.active = false;
    this.pause();
    this.lanes.options.until = null;
    this.lanes.options.cursor = null;
    this.lanes.selected = null;
    this.lanes.draw();
  }
}
