// The part of playground.py that is done in Pyodide: `node playground.mjs BUILD SCRIPT` prints what each answer takes.

import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [build, script] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${build}/website/node_modules/pyodide/pyodide.mjs`));
const python = await loadPyodide();
const folder = `${build}/site/playground`;
for (const name of JSON.parse(readFileSync(`${folder}/wheels.json`))) {
  python.unpackArchive(new Uint8Array(readFileSync(`${folder}/wheels/${name}`)), "wheel");
}
// Processor time, which the clock of the browser's Python does not have.
const seconds = () => {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
};
const names = python.toPy({ __name__: "playground", __file__: "/playground.py", seconds });
python.runPython(script, { globals: names });
console.log(python.runPython("begin(); json.dumps({name: measure(name, seconds) for name in PROGRAMS})", { globals: names }));
