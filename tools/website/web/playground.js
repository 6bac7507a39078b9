// The playground: a program on the left, what the compiler says of it on the right. The compiler runs
// in worker.js; the picture is the page of `schedc view`, in a frame.

import { defaultKeymap, history, historyKeymap } from "@codemirror/commands";
import { bracketMatching, indentUnit } from "@codemirror/language";
import { lintGutter, lintKeymap, setDiagnostics } from "@codemirror/lint";
import { EditorState, StateEffect, StateField } from "@codemirror/state";
import { Decoration, EditorView, drawSelection, highlightActiveLine, keymap, lineNumbers } from "@codemirror/view";

// Seconds that a text may take.
const LIMIT = 10;
const FIRST = "1f1b";
const LOADING = "loading the compiler …";
const byId = (id) => document.getElementById(id);

// ----- the editor

// Pieces of the text with their colours, as the compiler has them; until it has answered, they move
// with the text.
const setColours = StateEffect.define();
const colours = StateField.define({
  create: () => Decoration.none,
  update(marks, transaction) {
    for (const effect of transaction.effects) if (effect.is(setColours)) return effect.value;
    return marks.map(transaction.changes);
  },
  provide: (field) => EditorView.decorations.from(field),
});
const MARKS = {};
const markOf = (colour) => MARKS[colour] ??= Decoration.mark({ class: `tok-${colour}` });

const extensions = [
  lineNumbers(), history(), drawSelection(), highlightActiveLine(), bracketMatching(), lintGutter(), colours,
  indentUnit.of("    "),
  keymap.of([...defaultKeymap, ...historyKeymap, ...lintKeymap]),
  EditorView.contentAttributes.of({ "aria-label": "the program", spellcheck: "false", tabindex: "0" }),
  EditorView.updateListener.of((update) => { if (update.docChanged) typed(); }),
];
const editor = new EditorView({ parent: byId("editor"), state: EditorState.create({ extensions }) });
const text = () => editor.state.doc.toString();
function write(program) {
  editor.setState(EditorState.create({ doc: program, extensions }));
}

// ----- what is asked, and what is answered

// The parameters that were changed: the defaults of the others may depend on these.
let changed = {};
let number = 0, asked = 0, isReady = false, worker, watch;

function startWorker() {
  worker?.terminate();
  isReady = false;
  worker = new Worker("worker.js", { type: "module" });
  worker.onmessage = ({ data }) => hear(data);
  worker.onerror = () => say("the compiler could not be loaded", "wrong");
}

function ask() {
  number += 1;
  asked = performance.now();
  document.body.dataset.asked = number;
  worker.postMessage({ number, text: text(), params: changed });
  clearTimeout(watch);
  if (isReady) watch = setTimeout(giveUp, LIMIT * 1000);
}
function giveUp() {
  showDiagnostics({
    diagnostics: [],
    text: `It takes longer than ${LIMIT} s: stopped. Set smaller parameters; \`schedc compile\` has no limit.`,
  });
  say("stopped", "wrong");
  document.body.classList.add("stale");
  startWorker();
}

function hear({ number: of, answer, done, ready, broken }) {
  if (ready) {
    isReady = true;
    performance.mark("ready");
    // What was asked while it was loaded is answered now.
    clearTimeout(watch);
    watch = setTimeout(giveUp, LIMIT * 1000);
    return;
  }
  if (broken) return say(broken, "wrong");
  if (of !== number) return;
  if (done) {
    clearTimeout(watch);
    performance.measure("answered", { start: asked });
    document.body.dataset.answered = number;
    return;
  }
  show(JSON.parse(answer));
}

const SHOW = {
  colours: (pieces) => {
    const end = editor.state.doc.length;
    const marks = pieces.filter(([, to]) => to <= end).map(([from, to, colour]) => markOf(colour).range(from, to));
    editor.dispatch({ effects: setColours.of(Decoration.set(marks)) });
  },
  diagnostics: (_, answer) => showDiagnostics(answer),
  parameters: showParameters,
  schedules: async (schedules) => {
    const present = await picture;
    await present(schedules);
    performance.measure("drawn", { start: asked });
  },
  figures: (rows) => fill("figures", rows.map(([name, value, meaning]) => [[name], [value], [meaning, "meaning"]])),
  bubbles: (explanation) => { byId("bubbles").textContent = explanation; },
  verdicts: (verdicts) => fill("verdicts", verdicts.map(([name, wrong]) => [[name], wrong ? [wrong, "wrong"] : ["proved", "right"]])),
};
function show(answer) {
  const [[name, value]] = Object.entries(answer);
  SHOW[name](value, answer);
}

function showDiagnostics({ diagnostics, text: messages }) {
  const end = editor.state.doc.length, isWrong = diagnostics.some((each) => each.severity === "error");
  const shown = diagnostics.map(({ from, to, severity, code, message, repair }) => ({
    from: Math.min(from, end), to: Math.min(to, end), severity, message, source: code,
    actions: repair ? [{ name: repair.text, apply: (view) => view.dispatch({ changes: repair.edits }) }] : [],
  }));
  editor.dispatch(setDiagnostics(editor.state, shown));
  byId("messages").textContent = messages;
  byId("messages").hidden = !messages;
  byId("messages").className = isWrong ? "" : "warns";
  document.body.classList.toggle("stale", isWrong);
  const count = diagnostics.filter((each) => each.severity === "error").length;
  if (isWrong) say(count === 1 ? "1 error" : `${count} errors`, "wrong");
  else say(isReady ? "proved" : `proved; ${LOADING}`, "right");
}

function showParameters(values) {
  const group = byId("parameters"), names = Object.keys(values);
  if ([...group.querySelectorAll("input")].map((input) => input.name).join() !== names.join()) {
    group.replaceChildren(...names.map((name) => {
      const label = document.createElement("label");
      const input = Object.assign(document.createElement("input"), { type: "number", name });
      input.oninput = () => {
        if (input.value === "") return;
        changed[name] = Number(input.value);
        ask();
        keepAddress();
      };
      label.append(`${name} `, input);
      return label;
    }));
  }
  for (const input of group.querySelectorAll("input")) {
    if (input !== document.activeElement) input.value = values[input.name];
  }
}

function fill(id, rows) {
  byId(id).tBodies[0].replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    cells.forEach(([content, look], index) => {
      const isName = index === 0 && content;
      const cell = row.appendChild(document.createElement(isName ? "th" : "td"));
      if (isName) cell.scope = "row";
      cell.textContent = content;
      if (look) cell.className = look;
    });
    return row;
  }));
}

function say(what, look = "") {
  byId("status").textContent = what;
  byId("status").className = look;
}

// The page of `schedc view`, once it is there: what it presents schedules by.
const picture = new Promise((resolve) => {
  const frame = byId("picture"), isThere = () => frame.contentWindow.present;
  if (isThere()) resolve(frame.contentWindow.present);
  else frame.onload = () => resolve(frame.contentWindow.present);
});

// ----- the address: the name of a program, or a text and its parameters, packed

async function packed(value) {
  const stream = new Blob([JSON.stringify(value)]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const letters = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  return letters.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}
async function unpacked(letters) {
  const bytes = Uint8Array.from(atob(letters.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return JSON.parse(await new Response(stream).text());
}
const programOf = (name) => gallery.find((each) => each.name === name);
// Of two texts, the one that was packed last counts.
let packing = 0;
async function keepAddress() {
  const turn = ++packing, program = programOf(byId("programs").value);
  const isPlain = program?.text === text() && !Object.keys(changed).length;
  const state = isPlain ? `program=${program.name}` : `code=${await packed({ text: text(), params: changed })}`;
  if (turn === packing) window.history.replaceState(null, "", `#${state}`);
}

async function readAddress() {
  const state = new URLSearchParams(location.hash.slice(1));
  if (state.has("code")) {
    try {
      const { text: program, params } = await unpacked(state.get("code"));
      return open(program, params, gallery.find((each) => each.text === program)?.name);
    } catch {
      say("this link is damaged: it holds no program", "wrong");
    }
  }
  const { name, text: program } = programOf(state.get("program")) ?? programOf(FIRST);
  open(program, {}, name);
}

function open(program, params, name = "") {
  changed = params;
  byId("programs").value = name;
  write(program);
  ask();
  if (name && !isReady && !Object.keys(params).length) tellKnown(name);
}
// What is known of the programs of the gallery was asked when the site was built: it is there before the compiler.
async function tellKnown(name) {
  const turn = number, answers = await (await fetch(`answers/${name}.json`)).json();
  if (turn === number && !isReady) answers.forEach((answer) => show(JSON.parse(answer)));
}
function typed() {
  const program = programOf(byId("programs").value);
  if (program && program.text !== text()) byId("programs").value = "";
  ask();
  keepAddress();
}

// ----- the beginning

let gallery = [];
byId("programs").onchange = ({ target }) => {
  const program = programOf(target.value);
  if (!program) return;
  open(program.text, {}, program.name);
  keepAddress();
};
byId("share").onclick = async () => {
  await keepAddress();
  await navigator.clipboard.writeText(location.href);
  say("copied", "right");
};
addEventListener("hashchange", readAddress);

say(LOADING);
startWorker();
gallery = await (await fetch("programs.json")).json();
byId("programs").append(...gallery.map(({ name, title }) => new Option(`${name}: ${title}`, name)));
readAddress();
