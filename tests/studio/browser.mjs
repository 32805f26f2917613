// Drives the studio in Chromium. Prints one JSON object: for each check, null or what went wrong.
//
//     node browser.mjs PLAYWRIGHT CHROMIUM ADDRESS FILES PICTURES
//
// FILES is a folder with the files that are dropped onto the page. PICTURES is a folder for
// screenshots and downloads. With MEASURE=1 in the environment, it prints times instead.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [playwright, executablePath, address, files, pictures] = process.argv.slice(2);
const { chromium } = (await import(pathToFileURL(path.join(playwright, "index.js")))).default;
const MODEST = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

const browser = await chromium.launch({ executablePath, args: MODEST });
const context = await browser.newContext({ viewport: { width: 1440, height: 900 }, acceptDownloads: true });
const outside = [], faults = [];
context.on("request", (request) => { if (!request.url().startsWith(address) && !/^(blob|data):/.test(request.url())) outside.push(request.url()); });
const page = await context.newPage();
page.on("pageerror", (error) => faults.push(String(error)));
page.on("console", (message) => { if (message.type() === "error" && !/404/.test(message.text())) faults.push(message.text().slice(0, 300)); });
page.setDefaultTimeout(45_000);

const assert = (condition, message) => { if (!condition) throw new Error(message); };
const equal = (actual, expected, what) => assert(JSON.stringify(actual) === JSON.stringify(expected), `${what}: ${JSON.stringify(actual)} instead of ${JSON.stringify(expected)}`);
async function shot(name) {
  await page.mouse.move(2, 2);  // nothing is hovered
  await page.waitForTimeout(200);  // until transitions of colours have ended
  await page.screenshot({ path: path.join(pictures, `${name}.png`) });
}
const setting = () => page.evaluate(() => window.studio.setting);
const answer = () => page.evaluate(() => { const { lanes, memory, idle, text, ...rest } = window.studio.answer; return rest; });

/** Waits until the page shows the answer to its setting, and nothing urgent is left to compute. */
async function settled(to = page) {
  await to.waitForFunction(() => window.studio?.engine.ready && document.getElementById("state").dataset.state === "ready");
  await to.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
}

/** Waits until a function of the page gives true. */
const until = (test, argument) => page.waitForFunction(test, argument);

async function box(rank, position) {
  return page.evaluate(([rank, position]) => {
    const { lanes } = window.studio, { x, y, w, h } = lanes.boxOf({ rank, position }), frame = lanes.canvas.getBoundingClientRect();
    return { x: frame.left + x + w / 2, y: frame.top + y + h / 2, w, h };
  }, [rank, position]);
}

async function drag(rank, from, to) {
  const source = await box(rank, from), target = await box(rank, to), side = to > from ? 1 : -1;
  await page.mouse.move(source.x, source.y);
  await page.mouse.down();
  await page.mouse.move(source.x + 6 * side, source.y, { steps: 2 });
  await page.mouse.move(target.x + side * target.w * 0.3, target.y, { steps: 4 });
  await page.mouse.up();
}

async function dropFiles(names) {
  await page.setInputFiles("#file", names.map((name) => path.join(files, name)));
}

async function reset() {
  await page.evaluate(() => { window.location.hash = ""; });
  await page.evaluate(() => { if (document.getElementById("mode-learn").getAttribute("aria-pressed") === "true") document.getElementById("mode-explore").click(); });
  await page.selectOption("#preset", "0.1");
  await until(() => window.studio.setting.schedule === "1f1b" && window.studio.answer?.facts?.schedule === "1f1b" && window.studio.answer.chunks === 8 && !window.studio.measured);
  await settled();
}

// ---- the checks ----------------------------------------------------------------------------

const checks = {
  async "load"() {
    await page.goto(address);
    await until(() => performance.getEntriesByName("first-picture").length === 1);
    equal((await answer()).caption, "makespan 33, bubble 27.3%, peak 4 (4 3 2 1)", "caption");
    await settled();
    await until(() => document.querySelectorAll("#table tbody tr").length >= 15 && !/…/.test(document.getElementById("table").textContent));
    await shot("light");
  },

  async "every preset"() {
    const presets = await page.$$eval("#preset option", (options) => options.map((option) => option.value).filter(Boolean));
    assert(presets.length >= 15, "there are presets");
    for (const preset of presets.filter((value) => value !== "1.6" && value !== "1.5")) {  // the large ones are measured
      const before = JSON.stringify(await setting());
      await page.selectOption("#preset", preset);
      await page.waitForFunction((old) => JSON.stringify(window.studio.setting) !== old || old, before);
      await until(() => window.studio.answer?.facts?.schedule === window.studio.setting.schedule && window.studio.answer.chunks === window.studio.setting.chunks && document.getElementById("error").hidden);
    }
    await settled();
  },

  async "edit to a deadlock and back"() {
    await reset();
    await page.click("#edit");
    await drag(3, 0, 5);  // the first forward of the last rank after its backwards
    await until(() => window.studio.setting.schedule === "text" && window.studio.answer.problems.length > 0);
    const words = await page.textContent("#verdict");
    assert(/rank 3, step \d+: 3B0 waits for 3F0 \(rank 3, step \d+\)/.test(words), `the words of verify: ${words}`);
    assert((await answer()).waits.length >= 2, "the waits are drawn");
    await settled();
    await shot("deadlock");
    await page.keyboard.press("Control+z");
    await until(() => window.studio.setting.schedule === "1f1b" && window.studio.answer.problems.length === 0);
    await page.keyboard.press("Control+Shift+Z");
    await until(() => window.studio.setting.schedule === "text" && window.studio.answer.problems.length > 0);
    await page.keyboard.press("Control+z");
    await until(() => window.studio.setting.schedule === "1f1b");
    await page.waitForFunction(() => window.studio.answer.problems.length === 0);
    await drag(0, 3, 4);  // sound: one more warm-up forward swaps with the first backward
    await until(() => window.studio.setting.schedule === "text" && window.studio.answer.facts);
    assert(/Sound/.test(await page.textContent("#verdict")), "a sound edit says so");
    await page.click("#edit");
  },

  async "drop a trace"() {
    await reset();
    await dropFiles(["run.json"]);
    await until(() => window.studio.measured !== null && window.studio.lanes.bands.length === 2);
    assert(/The step took .* than planned|as planned/.test(await page.textContent("#run-sentences")), "a sentence says what it cost");
    await dropFiles(["run.json", "plan.json"]);
    await until(() => /backward of stage 2 took .* more than planned/.test(document.getElementById("run-sentences").textContent));
    await settled();
    await shot("measured");
    await page.click("#run-sentences .dismiss");
    await until(() => window.studio.measured === null && window.studio.lanes.bands.length === 1);
    await dropFiles(["plan.json", "run.json"]);  // the order does not matter
    await until(() => /more than planned/.test(document.getElementById("run-sentences").textContent));
    await page.click("#run-sentences .link");
    await until(() => window.studio.measured === null && window.studio.setting.profile[2] > window.studio.setting.profile[0]);
  },

  async "drop a plan and a profile"() {
    await reset();
    await dropFiles(["made-by-the-planner.json"]);
    await until(() => /no plan|certificate|bound|at most/i.test(document.getElementById("run-sentences").textContent) && window.studio.measured !== null);
    await settled();
    await shot("plan");
    await page.click("#run-sentences .dismiss");
    await until(() => window.studio.measured === null);
    await dropFiles(["profile.json"]);
    await until(() => window.studio.setting.profile.length === 6 && window.studio.answer.ranks === 2 && window.studio.answer.facts);
  },

  async "what JavaScript repeats agrees with the library"() {
    const expected = JSON.parse(fs.readFileSync(path.join(files, "repeated.json"), "utf8"));
    const found = await page.evaluate(async (numbers) => {
      const { formatNumber } = await import("./data.js");
      return numbers.map(formatNumber);
    }, expected.numbers.map(([number]) => number));
    equal(found, expected.numbers.map(([, text]) => text), "numbers as text");
    const colours = await page.evaluate(async (colours) => {
      const { inkOn } = await import("./lanes.js");
      return colours.map(inkOn);
    }, expected.colours.map(([colour]) => colour));
    equal(colours, expected.colours.map(([, ink]) => ink), "the ink on each colour");
    const shades = await page.evaluate(async (lists) => {
      const { stageShades } = await import("./data.js");
      return lists.map(stageShades);
    }, expected.shades.map(([placement]) => placement));
    equal(shades, expected.shades.map(([, shades]) => shades), "the shade of each stage");
  },

  async "drop with the mouse"() {
    await reset();
    const text = fs.readFileSync(path.join(files, "mine.txt"), "utf8");
    const data = await page.evaluateHandle((content) => {
      const transfer = new DataTransfer();
      transfer.items.add(new File([content], "mine.txt"));
      return transfer;
    }, text);
    await page.dispatchEvent("body", "dragenter", { dataTransfer: data });
    assert(await page.isVisible("#drop"), "the page says what can be dropped");
    await page.dispatchEvent("body", "drop", { dataTransfer: data });
    await until(() => window.studio.setting.schedule === "text" && window.studio.answer.facts);
    assert(!await page.isVisible("#drop"), "and stops saying so");
  },

  async "share by URL"() {
    await reset();
    await page.hover("#table tbody tr:first-child");  // rows arrive one by one below the pointer
    await page.fill("#ranks", "6");
    await page.press("#ranks", "Enter");
    await until(() => window.studio.answer?.ranks === 6 && !/…/.test(document.getElementById("table").textContent));
    await page.fill("#chunks", "1.5");
    await page.press("#chunks", "Enter");
    assert(/'1.5' is not a whole number/.test(await page.textContent("#error")), "a bad number is refused in words");
    await page.fill("#chunks", "8");
    await page.press("#chunks", "Enter");
    await page.fill("#skips", "0:3, 2:5");
    await page.press("#skips", "Enter");
    await until(() => window.studio.answer?.ranks === 6 && window.studio.setting.skips.length === 2);
    await page.click("#share");
    await page.waitForFunction(() => location.hash.length > 4);
    const link = page.url(), sent = await setting(), other = await context.newPage();
    await other.goto(link);
    await other.waitForFunction(() => window.studio?.answer?.ranks === 6, null, { timeout: 60_000 });
    equal(await other.evaluate(() => window.studio.setting), sent, "the setting of the link");
    await other.close();
    await page.evaluate(() => { window.location.hash = "not a link"; });
    await until(() => /This link cannot be opened/.test(document.getElementById("error").textContent));
  },

  async "export"() {
    await reset();
    for (const [format, ending, begins] of [["text", "txt", "placement: 0 1 2 3"], ["svg", "svg", "<svg"], ["perfetto", "perfetto.json", '{"traceEvents"'], ["timeline", "timeline.json", '{"format":"penstock timeline'], ["png", "png", "\x89PNG"]]) {
      await page.click("#export");
      const [saved] = await Promise.all([page.waitForEvent("download"), page.click(`[data-format=${format}]`)]);
      const file = path.join(pictures, `exported.${ending}`);
      await saved.saveAs(file);
      assert(saved.suggestedFilename().endsWith(ending), saved.suggestedFilename());
      assert(fs.readFileSync(file, "latin1").startsWith(begins), `${format} begins with ${fs.readFileSync(file, "latin1").slice(0, 30)}`);
    }
  },

  async "keyboard alone"() {
    await reset();
    equal(await page.evaluate(() => document.querySelector("a, button, input, select").className), "skip-link", "the first stop of the Tab key");
    await page.focus(".skip-link");
    await page.keyboard.press("Enter");
    equal(await page.evaluate(() => document.activeElement.id), "lanes", "the skip link leads to the timeline");
    for (const key of ["ArrowRight", "ArrowDown", "ArrowRight"]) await page.keyboard.press(key);
    await until(() => window.studio.lanes.selected?.rank === 1);
    assert(/^1F\d/.test(await page.textContent("#announce")), `the action is announced: ${await page.textContent("#announce")}`);
    await until(() => /forward of stage 1/.test(document.getElementById("detail").textContent));
    const before = await page.evaluate(() => window.studio.lanes.selected.position);
    await page.keyboard.press("Alt+ArrowRight");
    await until((position) => window.studio.setting.schedule === "text" && window.studio.lanes.selected.position === position + 1, before);
    await page.keyboard.press("c");
    equal(await page.getAttribute("#critical", "aria-pressed"), "true", "c shows the critical path");
    await page.keyboard.press("c");
    await page.keyboard.press("?");
    assert(await page.isVisible("#keys"), "? lists the keys");
    await page.keyboard.press("Escape");
    await page.focus("#bars [role=slider]");
    await page.keyboard.press("ArrowUp");
    await until(() => window.studio.setting.profile[0] > 1);
    const order = await page.evaluate(() => [...document.querySelectorAll("button, input, select, canvas[tabindex]")].filter((item) => item.offsetParent && item.ariaHidden !== "true" && !item.labels?.length && !item.ariaLabel && !item.textContent.trim() && !item.title).map((item) => item.id));
    equal(order, [], "controls without a name");
  },

  async "learn"() {
    await reset();
    await page.focus("#lanes");
    await page.keyboard.press("l");
    await until(() => document.getElementById("lesson-count").textContent === "0 / 32");
    for (let chapter = 0; chapter < 5; chapter++) {
      await page.click(`#chapters button:nth-child(${chapter + 1})`);
      await until((chapter) => window.studio.answer?.facts?.schedule === ["naive", "gpipe", "1f1b", "interleaved", "zb-v"][chapter] && / 0?\/? ?\d+$/.test(document.getElementById("lesson-count").textContent) && document.getElementById("lesson-count").textContent.startsWith("0 /"), chapter);
      await page.click("#lesson-next");
      await until(() => /^Rank 0 runs the forward of stage 0 on micro-batch 0/.test(document.getElementById("lesson-text").textContent));
    }
    await page.click("#lesson-play");
    await until(() => Number(document.getElementById("lesson-at").value) > 8);
    await shot("learn");
    await page.click("#lesson-play");
    await page.click("#mode-explore");
    await until(() => window.studio.lanes.options.until === null);
  },

  async "bad files"() {
    await reset();
    const expected = {
      "broken.json": /not a timeline/, "cut.json": /not JSON/, "chunks.txt": /too many to draw/, "noise.bin": /is not text|up to 32 MB/,
      "large.bin": /100 MB\. The studio reads files of up to 32 MB/, "scripts.txt": /is not an action/, "names.json": /not a timeline/, "deep.json": /not JSON|was started again/,
    };
    for (const [name, message] of Object.entries(expected)) {
      await page.evaluate(() => { document.getElementById("error").hidden = true; });
      await dropFiles([name]);
      await page.waitForFunction(() => !document.getElementById("error").hidden, null, { timeout: 60_000 });
      const words = await page.textContent("#error");
      assert(message.test(words), `${name}: ${words.slice(0, 300)}`);
    }
    assert(await page.evaluate(() => window.executed === undefined && !document.querySelector("#error script, #error img")), "nothing of a file is executed");
    await page.fill("#chunks", "1000000000");
    await page.press("#chunks", "Enter");
    await until(() => /are allowed/.test(document.getElementById("error").textContent));
    await page.keyboard.press("Control+z");
    await reset();
  },

  async "dark theme"() {
    await page.emulateMedia({ colorScheme: "dark" });
    await until(() => document.documentElement.dataset.theme === "dark" && window.studio.lanes.theme === "dark");
    await page.selectOption("#preset", "0.5");
    await until(() => window.studio.answer?.facts?.schedule === "zb-v");
    await settled();
    await shot("dark");
    await page.click("#theme");
    equal(await page.evaluate(() => document.documentElement.dataset.theme), "light", "the button changes the theme");
  },

  async "phone width"() {
    await page.setViewportSize({ width: 390, height: 844 });
    await settled();
    const wide = await page.evaluate(() => document.documentElement.scrollWidth);
    assert(wide <= 390, `the page is ${wide} pixels wide on a phone`);
    await shot("phone");
    await page.setViewportSize({ width: 1440, height: 900 });
  },

  async "embedded in another page"() {
    const frame = await context.newPage(), asked = [];
    frame.on("request", (request) => asked.push(request.url()));
    await frame.setViewportSize({ width: 900, height: 760 });
    await frame.goto(`${address}?embed`);
    await frame.waitForFunction(() => performance.getEntriesByName("first-picture").length === 1);
    await frame.waitForTimeout(300);
    assert(!asked.some((url) => /pyodide/.test(url)), "Python is not loaded before somebody uses the studio");
    assert(await frame.evaluate(() => document.querySelectorAll("#table tbody tr").length >= 15 && !/…/.test(document.getElementById("table").textContent)), "the table is there without Python");
    await frame.evaluate(() => window.postMessage({ theme: "dark" }, location.origin));
    await frame.waitForFunction(() => document.documentElement.dataset.theme === "dark" && window.studio.lanes.theme === "dark");
    await frame.click("[data-schedule='zb-v']");
    await frame.waitForFunction(() => window.studio.answer?.facts?.schedule === "zb-v");
    const [left, right, wide] = await frame.evaluate(() => [document.querySelector(".panel.left").getBoundingClientRect().right, document.querySelector(".panel.right").getBoundingClientRect().left, document.documentElement.scrollWidth]);
    assert(left <= right && wide <= 900, `the panels do not overlap: ${left}, ${right}, ${wide}`);
    const [whole] = await Promise.all([context.waitForEvent("page"), frame.click("#whole")]);
    await whole.waitForFunction(() => window.studio?.answer?.facts?.schedule === "zb-v");
    assert(!/embed/.test(whole.url()), "a window of its own is not embedded");
    await whole.close();
    await frame.close();
  },

  async "no request leaves localhost"() {
    equal(outside, [], "requests to elsewhere");
    const refused = await page.evaluate(() => fetch("https://example.org/").then(() => false, () => true));
    assert(refused, "the page may not ask another host");
    faults.splice(0, faults.length, ...faults.filter((fault) => !/example\.org/.test(fault)));
  },

  async "no error in the console"() {
    // Python overflows its stack on purpose in "bad files", and says so.
    equal(faults.filter((fault) => !/Pyodide has suffered a fatal error|The cause of the fatal error|Maximum call stack/.test(fault)), [], "errors");
  },
};

// ---- measurements --------------------------------------------------------------------------

async function measure() {
  const times = {}, median = (list) => [...list].sort((a, b) => a - b)[list.length >> 1];
  const start = Date.now();
  await page.goto(address);
  await until(() => performance.getEntriesByName("first-picture").length);
  times.first_picture_ms = Math.round(await page.evaluate(() => performance.getEntriesByName("first-picture")[0].startTime));
  await page.waitForFunction(() => window.studio.engine.ready);
  times.python_ready_ms = Date.now() - start;
  await settled();
  for (const schedule of ["1f1b", "zb-v"]) {
    await page.evaluate(() => { window.location.hash = ""; });
    await page.selectOption("#preset", schedule === "zb-v" ? "0.5" : "0.1");
    await page.fill("#ranks", "8");
    await page.press("#ranks", "Enter");
    await page.fill("#chunks", "32");
    await page.press("#chunks", "Enter");
    await until((schedule) => window.studio.answer?.ranks === 8 && window.studio.answer.chunks === 32 && window.studio.answer.facts?.schedule === schedule, schedule);
    await settled();
    if (await page.getAttribute("#edit", "aria-pressed") === "false") await page.click("#edit");
    await page.evaluate(() => performance.clearMeasures());
    const source = await box(2, 20);
    await page.mouse.move(source.x, source.y);
    await page.mouse.down();
    for (let i = 1; i <= 40; i++) { await page.mouse.move(source.x + i * 9, source.y); await page.waitForTimeout(120); }
    await page.mouse.up();
    const drags = await page.evaluate(() => performance.getEntriesByName("drag").map((entry) => entry.duration));
    times[`drag_8x32_${schedule}_ms`] = { count: drags.length, median: Math.round(median(drags)), most: Math.round(Math.max(...drags)) };
    await page.keyboard.press("Control+z");
    await settled();
  }
  await page.click("#edit");
  const before = Date.now();
  await page.selectOption("#preset", "1.6");
  await page.waitForFunction(() => window.studio.answer?.ranks === 1000, null, { timeout: 240_000 });
  times.large_answer_ms = Date.now() - before;
  await settled();
  const frame = await page.locator("#lanes").boundingBox();
  for (const [name, zooms] of [["fit", 0], ["middle", 5], ["zoomed", 9]]) {
    await page.click("#fit-view");
    for (let i = 0; i < zooms; i++) await page.click("#zoom-in");
    await page.evaluate(() => { window.studio.lanes.view.time = 0; window.studio.lanes.pan(0, 0); });  // where the actions are
    await page.mouse.move(frame.x + frame.width / 2, frame.y + frame.height / 2);
    await shot(`large-${name}`);
    const file = path.join(pictures, `trace-${name}.json`);
    await browser.startTracing(page, { path: file, categories: ["devtools.timeline", "benchmark", "disabled-by-default-devtools.timeline.frame"] });
    const frames = await page.evaluate(() => new Promise((done) => {
      const { lanes } = window.studio, begin = performance.now(), painted = [];
      lanes.addEventListener("paint", () => painted.push(performance.now()));
      const tick = () => {
        const now = performance.now() - begin;
        if (now > 4000) { done(painted.length / (now / 1000)); return; }
        lanes.view.scale *= 1 + 0.01 * Math.sin(now / 300);
        lanes.pan(Math.sin(now / 500) * 14, Math.cos(now / 400) * 10);
        requestAnimationFrame(tick);
      };
      tick();
    }));
    await browser.stopTracing();
    const events = JSON.parse(fs.readFileSync(file, "utf8")).traceEvents;
    const drawn = events.filter((event) => event.name === "DrawFrame").map((event) => event.ts).sort((a, b) => a - b);
    const gaps = drawn.slice(1).map((ts, i) => (ts - drawn[i]) / 1000);
    times[`scroll_1000x64_${name}`] = { painted_per_second: Math.round(frames), trace_frames_per_second: Math.round((drawn.length - 1) / ((drawn.at(-1) - drawn[0]) / 1e6)), median_gap_ms: Math.round(median(gaps)), paint_ms: await page.evaluate(() => { const begin = performance.now(); for (let i = 0; i < 20; i++) window.studio.lanes.paint(); return Math.round((performance.now() - begin) / 2) / 10; }) };
  }
  return times;
}

const results = {};
if (process.env.MEASURE) {
  Object.assign(results, await measure());
} else {
  const only = process.env.CHECKS?.split(";");
  for (const [name, check] of Object.entries(checks)) {
    if (only && !only.includes(name)) continue;
    try {
      await check();
      results[name] = null;
    } catch (error) {
      results[name] = `${error.message ?? error}`.slice(0, 1500);
      await shot(`failed-${name.replaceAll(" ", "-")}`).catch(() => {});
    }
  }
}
await browser.close();
console.log(JSON.stringify(results));
