// Runs penstock.studio.requests.answer in Pyodide. A message {id, request} is answered by {id, answer}.
import { loadPyodide } from "./pyodide/pyodide.mjs";

async function start() {
  const modules = fetch("./penstock.zip").then((response) => response.arrayBuffer());
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", self.location.href).href, packages: [] });
  python.FS.writeFile("/penstock.zip", new Uint8Array(await modules));
  python.runPython("import sys; sys.path.insert(0, '/penstock.zip')");
  return python.runPython("from penstock.studio.requests import answer; answer");
}

const ready = start();
ready.then(
  () => self.postMessage({ ready: true }),
  (error) => self.postMessage({ failed: String(error).slice(0, 600) }),
);

self.onmessage = async ({ data }) => {
  const answer = await ready;
  try {
    self.postMessage({ id: data.id, answer: answer(data.request) });
  } catch (error) {  // Python itself has failed, for example because its stack overflowed
    self.postMessage({ id: data.id, crashed: String(error).slice(0, 300) });
  }
};
