// The compiler, in a thread of its own: Pyodide with numpy and this project's wheel. It is asked about
// one text after another, and gives up a text when there is a newer one.

import { loadPyodide } from "./pyodide/pyodide.mjs";

const fetched = async (url) => (await fetch(url)).arrayBuffer();

async function start() {
  const wheels = await (await fetch("wheels.json")).json();
  const pieces = [
    loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href }),
    ...wheels.map((name) => fetched(`wheels/${name}`)),
  ];
  let loaded = 0;
  for (const piece of pieces) piece.then(() => postMessage({ loaded: ++loaded, all: pieces.length }));
  const [python, ...archives] = await Promise.all(pieces);
  for (const archive of archives) python.unpackArchive(archive, "wheel");
  const playground = python.pyimport("schedlang.extras.editor.playground");
  playground.begin();
  return (text, params) => playground.answers(text, python.toPy(params));
}
const starting = start();
starting.then(() => postMessage({ ready: true }), (error) => postMessage({ broken: String(error) }));

// Let the messages in that have come meanwhile.
const { port1, port2 } = new MessageChannel();
const turn = () => new Promise((resolve) => {
  port1.onmessage = resolve;
  port2.postMessage(null);
});

let newest = null, isBusy = false;
onmessage = async ({ data }) => {
  newest = data;
  if (isBusy) return;
  isBusy = true;
  const ask = await starting;
  while (newest) {
    const { number, text, params } = newest;
    newest = null;
    try {
      for (const answer of ask(text, params)) {
        postMessage({ number, answer });
        await turn();
        if (newest) break;
      }
      if (!newest) postMessage({ number, done: true });
    } catch (error) {
      postMessage({ number, broken: String(error) });
    }
  }
  isBusy = false;
};
