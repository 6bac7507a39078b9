// `node bytecode.mjs PLAYGROUND`: the archives of a playground, with the bytecode of what its start imports.

import { readFileSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const folder = resolve(process.argv[2]);
const { loadPyodide } = await import(pathToFileURL(`${folder}/pyodide/pyodide.mjs`));
const python = await loadPyodide({ indexURL: `${folder}/pyodide/` });
const wheels = JSON.parse(readFileSync(`${folder}/wheels.json`)).map((name) => `wheels/${name}`);
const archives = ["pyodide/python_stdlib.zip", ...wheels];
for (const name of wheels) python.unpackArchive(new Uint8Array(readFileSync(`${folder}/${name}`)), "wheel");
python.pyimport("schedlang.extras.editor.playground").begin();
const modules = python.runPython(readFileSync(new URL("bytecode.py", import.meta.url), "utf-8") + "\nloaded()");
for (const name of archives) {
  python.FS.writeFile("/archive", new Uint8Array(readFileSync(`${folder}/${name}`)));
  python.globals.get("with_bytecode")("/archive", modules);
  writeFileSync(`${folder}/${name}`, python.FS.readFile("/archive"));
}
