// The page: one view of time for all schedules, its controls, and what the pointer and the keys do.

const byId = (id) => document.getElementById(id);
const schedules = JSON.parse(byId("data").textContent);
const view = { from: 0, to: 1, memory: true, arrows: false, marks: true, chosen: 0 };
const timelines = schedules.map((schedule) => new Timeline(schedule, view, byId("schedules")));
const differ = timelines.some((each) => each.schedule.boxes.mark);
if (timelines.length === 2) timelines.forEach((each, index) => { each.other = timelines[1 - index]; });
const all = {
  from: Math.min(...timelines.map((each) => each.from)),
  to: Math.max(...timelines.map((each) => each.to)),
};
if (all.to === all.from) all.to += 1;

let frame = 0;
function redraw() {
  frame ||= requestAnimationFrame(drawAll);
}
function drawAll() {
  cancelAnimationFrame(frame);
  frame = 0;
  for (const timeline of timelines) timeline.draw();
  byId("range").textContent = `${number(view.from)} to ${number(view.to)}`;
}

function show(from, to) {
  const span = Math.min(Math.max(to - from, (all.to - all.from) * 1e-5), all.to - all.from);
  view.from = Math.min(Math.max(from, all.from), all.to - span);
  view.to = view.from + span;
  redraw();
}
const span = () => view.to - view.from;
const move = (time) => show(view.from + time, view.to + time);
function zoom(factor, at = (view.from + view.to) / 2) {
  const width = Math.min(span() * factor, all.to - all.from);
  const from = at - (at - view.from) * (width / span());
  show(from, from + width);
}

// The microbatch in flight, the same place in every schedule's order of first starts; 0 is all of them.
function choose(number) {
  view.chosen = number;
  byId("microbatch").value = number;
  byId("flight").textContent = number ? timelines.map((each) => flightText(each, number)).join(" | ") : "all";
  redraw();
}
function flightText(timeline, chosen) {
  const flight = timeline.flights[chosen - 1];
  if (!flight) return "none";
  const others = timeline.flights.filter((each) => each.start <= flight.start && each.end > flight.start).length;
  return `${flight.name}: ${number(flight.start)} to ${number(flight.end)}, ${others} in flight as it starts`;
}

function hover(timeline, box, event) {
  for (const each of timelines) each.hovered = each === timeline ? box : undefined;
  const tip = byId("tip");
  tip.hidden = box === undefined;
  if (box !== undefined) {
    const [word, ...lines] = timeline.describe(box);
    const line = lines.pop();
    tip.replaceChildren(element("b", word), ...lines.map((text) => element("div", text)), element("code", line));
    const { width, height } = tip.getBoundingClientRect();
    const x = event.clientX + 14, y = event.clientY + 16;
    tip.style.left = `${Math.max(Math.min(x, innerWidth - width - 6), 6)}px`;
    tip.style.top = `${y + height < innerHeight ? y : event.clientY - height - 10}px`;
  }
  redraw();
}
function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function listen(timeline) {
  const { canvas, scroll } = timeline;
  let drag = null;
  const at = (event) => timeline.at(event.offsetX, event.offsetY);
  canvas.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, from: view.from, top: scroll.scrollTop, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return hover(timeline, at(event), event);
    drag.moved ||= Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 4;
    if (!drag.moved) return;
    hover(timeline, undefined, event);
    const from = drag.from - (event.clientX - drag.x) / timeline.scale;
    scroll.scrollTop = drag.top - (event.clientY - drag.y);
    show(from, from + span());
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved) {
      const box = at(event);
      choose(box === undefined ? 0 : timeline.flights.indexOf(timeline.flight[box]) + 1);
    }
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", (event) => hover(timeline, undefined, event));
  canvas.addEventListener("dblclick", () => show(all.from, all.to));
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.0025), timeline.time(event.offsetX));
    else if (Math.abs(sideways) > 0) move(sideways / timeline.scale);
    else return; // The rows scroll.
    event.preventDefault();
  }, { passive: false });
  scroll.addEventListener("scroll", redraw);
}

const keys = {
  w: () => zoom(0.7), "+": () => zoom(0.7), "=": () => zoom(0.7), s: () => zoom(1 / 0.7), "-": () => zoom(1 / 0.7),
  a: () => move(-span() / 8), d: () => move(span() / 8), 0: () => show(all.from, all.to),
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  keys[event.key]?.();
});

function legend() {
  const items = new Map();
  for (const { kinds } of schedules) {
    for (const { name, fills, step } of Object.values(kinds)) {
      const shades = step ? ["var(--ink)"] : [...new Set(fills)];
      if (!items.has(name) || items.get(name).length < shades.length) items.set(name, shades);
    }
  }
  if (Math.max(...[...items.values()].map((shades) => shades.length)) > 1) {
    items.set("light to dark: the chunks of a rank", []);
  }
  for (const { versions } of schedules) {
    if (versions.length) items.set(`strip: version of the weights, modulo ${versions.length}`, versions);
  }
  items.set("needed by the op under the pointer", ["var(--needs)"]);
  items.set("needs it", ["var(--needed)"]);
  if (differ) {
    items.set("only in this schedule", ["var(--only)"]);
    items.set("moved", ["var(--moved)"]);
  }
  for (const [name, fills] of items) {
    const item = byId("legend").appendChild(document.createElement("span"));
    for (const fill of fills) item.appendChild(document.createElement("i")).style.background = fill;
    item.append(name);
  }
}

function arrange(stacked) {
  byId("schedules").className = stacked ? "stacked" : "";
  byId("arrange").textContent = stacked ? "side by side" : "one above the other";
  redraw();
}

timelines.forEach(listen);
legend();
byId("in").onclick = () => zoom(0.5);
byId("out").onclick = () => zoom(2);
byId("fit").onclick = () => show(all.from, all.to);
byId("memory").onchange = (event) => { view.memory = event.target.checked; redraw(); };
byId("arrows").onchange = (event) => { view.arrows = event.target.checked; redraw(); };
byId("marks").onchange = (event) => { view.marks = event.target.checked; redraw(); };
byId("differ").hidden = !differ;
byId("microbatch").max = Math.max(...timelines.map((each) => each.flights.length));
byId("microbatch").oninput = (event) => choose(Number(event.target.value));
byId("arrange").hidden = timelines.length < 2;
byId("arrange").onclick = () => arrange(!byId("schedules").className);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(redraw).observe(byId("schedules"));
arrange(false);
choose(0);
show(all.from, all.to);
drawAll();
performance.mark("drawn");
