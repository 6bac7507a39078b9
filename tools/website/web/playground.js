// The playground: a program on the left, what the compiler says of it on the right. The compiler runs
// in worker.js; the picture is the page of `schedc view`, in a frame.

import { defaultKeymap, history, historyKeymap } from "@codemirror/commands";
import { bracketMatching, indentUnit } from "@codemirror/language";
import { lintGutter, lintKeymap, setDiagnostics } from "@codemirror/lint";
import { EditorState, StateEffect, StateField } from "@codemirror/state";
import { Decoration, EditorView, drawSelection, highlightActiveLine, keymap, lineNumbers } from "@codemirror/view";

// Seconds that a text may take.
const LIMIT = 10;
// Milliseconds for which a button says that a link was copied.
const COPIED = 2000;
const FIRST = "1f1b";
const LOADING = "loading the compiler …", CHECKING = "checking …";
const byId = (id) => document.getElementById(id);
// Within the front page, the compiler is loaded with the first key: what is there until then was known before.
const isEmbedded = new URLSearchParams(location.search).has("embedded");
document.body.classList.toggle("embedded", isEmbedded);

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
//
//     key ─► outdated: all is grey ─► colours ─► diagnostics ─► picture ─► figures ─► idle time ─► verdicts
//
// Each part of the page says something of the text that stands there now, or is grey until it does.

// The parameters that were changed: the defaults of the others may depend on these.
let changed = {};
let number = 0, asked = 0, isReady = false, isWaiting = false, worker, watch;

function startWorker() {
  worker?.terminate();
  setReady(false);
  worker = new Worker("worker.js", { type: "module" });
  worker.onmessage = ({ data }) => hear(data);
  worker.onerror = () => say("the compiler could not be loaded", "wrong");
}

function setReady(value) {
  isReady = value;
  document.body.classList.toggle("loading", !isReady);
}

// All that is said is of an earlier text.
function outdate() {
  for (const part of document.querySelectorAll(".part")) part.classList.add("stale");
  for (const cell of byId("verdicts").querySelectorAll("td")) Object.assign(cell, { textContent: "…", className: "" });
  picture.then((page) => page.outdate("of an earlier text"));
}
function renew(id) {
  byId(id).classList.remove("stale");
}

function ask() {
  if (!worker) startWorker();
  number += 1;
  asked = performance.now();
  document.body.dataset.asked = number;
  isWaiting = true;
  outdate();
  say(isReady ? CHECKING : LOADING);
  worker.postMessage({ number, text: text(), params: changed });
  clearTimeout(watch);
  if (isReady) watch = setTimeout(giveUp, LIMIT * 1000);
}
function giveUp() {
  isWaiting = false;
  showDiagnostics({
    diagnostics: [],
    text: `It takes longer than ${LIMIT} s: stopped. Set smaller parameters; \`schedc compile\` has no limit.`,
  });
  say("stopped", "wrong");
  startWorker();
}

function hear({ number: of, answer, done, ready, broken, loaded, all }) {
  if (ready) {
    setReady(true);
    performance.mark("ready");
    if (!isWaiting) return;
    // What was asked while it was loaded is answered now.
    say(CHECKING);
    clearTimeout(watch);
    watch = setTimeout(giveUp, LIMIT * 1000);
    return;
  }
  if (loaded) return isWaiting && say(`${LOADING} ${loaded} of ${all}`);
  // An answer to an older text is nobody's; the compiler itself has no number.
  if (of !== undefined && of !== number) return;
  if (broken) return say(broken, "wrong");
  if (done) {
    isWaiting = false;
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
    const of = number, page = await picture;
    if (of === number) await page.present(schedules);
    performance.measure("drawn", { start: asked });
  },
  figures: (rows) => fill("figures", rows.map(([name, value, meaning]) => [[name], [value], [meaning, "meaning"]])),
  bubbles: (explanation) => {
    byId("bubbles").textContent = explanation;
    renew("idle");
  },
  verdicts: (verdicts) => fill("verdicts", verdicts.map(([name, wrong]) => [[name], wrong ? [wrong, "wrong"] : ["proved", "right"]])),
};
function show(answer) {
  const [[name, value]] = Object.entries(answer);
  SHOW[name](value, answer);
}

function showDiagnostics({ diagnostics, text: messages }) {
  // A repair is of this text.
  const of = number;
  const end = editor.state.doc.length, isWrong = diagnostics.some((each) => each.severity === "error");
  const shown = diagnostics.map(({ from, to, severity, code, message, repair }) => ({
    from: Math.min(from, end), to: Math.min(to, end), severity, message, source: code,
    actions: repair ? [{ name: repair.text, apply: (view) => of === number && view.dispatch({ changes: repair.edits }) }] : [],
  }));
  editor.dispatch(setDiagnostics(editor.state, shown));
  byId("messages").textContent = messages;
  byId("messages").hidden = !messages;
  byId("messages").classList.toggle("warns", !isWrong);
  renew("messages");
  const count = diagnostics.filter((each) => each.severity === "error").length;
  if (isWrong) say(count === 1 ? "1 error" : `${count} errors`, "wrong");
  // Until the compiler is there, what is known of a program of the gallery is what it said as the site was built.
  else if (isReady) say("proved", "right");
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
  renew(id);
}

function say(what, look = "") {
  byId("status").textContent = what;
  byId("status").className = look;
}

// The page of `schedc view`, once it is there: its functions `present` and `outdate`.
const picture = new Promise((resolve) => {
  const frame = byId("picture");
  if (frame.contentWindow.present) resolve(frame.contentWindow);
  else frame.onload = () => resolve(frame.contentWindow);
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
  byId("whole").href = `index.html#${state}`;
}

async function readAddress() {
  const state = new URLSearchParams(location.hash.slice(1));
  if (state.has("code")) {
    try {
      const { text: program, params } = await unpacked(state.get("code"));
      return open(program, params, gallery.find((each) => each.text === program)?.name);
    } catch {
      byId("notice").textContent = "this link is damaged: it holds no program";
    }
  }
  const { name, text: program } = programOf(state.get("program")) ?? programOf(FIRST);
  open(program, {}, name);
}

function open(program, params, name = "") {
  changed = params;
  byId("programs").value = name;
  write(program);
  const isKnown = name && !isReady && !Object.keys(params).length;
  if (isKnown && isEmbedded && !worker) say("change it: the compiler is loaded with the first key");
  else ask();
  if (isKnown) tellKnown(name);
}
// What is known of the programs of the gallery was asked when the site was built: it is there before the compiler.
async function tellKnown(name) {
  const turn = number, answers = await (await fetch(`answers/${name}.json`)).json();
  if (turn === number && !isReady) answers.forEach((answer) => show(JSON.parse(answer)));
}
function typed() {
  byId("notice").textContent = "";
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
  byId("share").textContent = "copied";
  setTimeout(() => { byId("share").textContent = "copy link"; }, COPIED);
};
addEventListener("hashchange", readAddress);

if (!isEmbedded) startWorker();
say(LOADING);
gallery = await (await fetch("programs.json")).json();
byId("programs").append(...gallery.map(({ name, title }) => new Option(`${name}: ${title}`, name)));
readAddress();
