// Asks the library in the worker. One request is in flight; the others wait, the most urgent first.
// A request with a key replaces a waiting one with the same key, whose promise then gives null.

export class Engine extends EventTarget {
  #worker = null;
  #waiting = [];
  #current = null;
  #counter = 0;
  #ready = false;

  /** With `wait`, Python starts with the first request, or when `start` is called. */
  constructor({ wait = false } = {}) {
    super();
    if (!wait) this.#start();
  }

  start() { if (!this.#worker) this.#start(); }

  get ready() { return this.#ready; }

  #start() {
    this.#ready = false;
    this.#worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.#worker.onmessage = ({ data }) => this.#receive(data);
    this.#worker.onerror = (event) => {
      event.preventDefault();
      this.#report("failed", event.message || "the worker could not be loaded");
    };
    this.#report("starting");
  }

  #report(state, detail = "") {
    this.dispatchEvent(new CustomEvent("state", { detail: { state, text: detail } }));
  }

  #receive(data) {
    if (data.ready) {
      this.#ready = true;
      this.#report("ready");
      this.#next();
    } else if (data.failed) {
      this.#report("failed", data.failed);
    } else if (this.#current?.id === data.id) {
      const { resolve } = this.#current;
      this.#current = null;
      if (data.crashed) {
        resolve({ ok: false, error: `Python failed on this and was started again. (${data.crashed})` });
        this.#worker.terminate();
        this.#start();
        return;
      }
      resolve(JSON.parse(data.answer));
      this.#next();
      if (!this.#current) this.#report("ready");
    }
  }

  #next() {
    if (!this.#ready || this.#current || !this.#waiting.length) return;
    this.#waiting.sort((a, b) => b.urgency - a.urgency || a.id - b.id);
    this.#current = this.#waiting.shift();
    this.#worker.postMessage({ id: this.#current.id, request: this.#current.request });
    this.#report("busy", this.#current.kind);
  }

  /** Returns a promise of the parsed answer, or of null if a newer request took its place. */
  ask(kind, fields = {}, { key = "", urgency = 0 } = {}) {
    if (key) this.cancel(key);
    this.start();
    return new Promise((resolve) => {
      this.#waiting.push({ id: ++this.#counter, kind, key, urgency, resolve, request: JSON.stringify({ kind, ...fields }) });
      this.#next();
    });
  }

  /** Drops waiting requests with this key. */
  cancel(key) {
    const dropped = this.#waiting.filter((item) => item.key === key);
    this.#waiting = this.#waiting.filter((item) => item.key !== key);
    for (const item of dropped) item.resolve(null);
  }

  /** Ends what is being computed, by starting Python anew. */
  stop() {
    this.#worker.terminate();
    const dropped = [...(this.#current ? [this.#current] : []), ...this.#waiting];
    this.#current = null;
    this.#waiting = [];
    for (const item of dropped) item.resolve(null);
    this.#start();
  }
}
