// The page: one view of time for all schedules, its controls, and what the pointer and the keys do.

// How much higher rows may be than where all are in sight.
const MOST_ROWS = 32;
const byId = (id) => document.getElementById(id);
let timelines = [];
let all = { from: 0, to: 1 };

// Until schedules are there, what is shown is not of what was asked last: it is grey, and `why` says so.
let turn = 0;
function outdate(why) {
  turn += 1;
  byId("state").textContent = why;
  document.body.classList.add("outdated");
}

// Show some schedules, in place of those that there were.
async function present(data) {
  if (!data.length) return;
  const own = ++turn, columns = await Promise.all(data.map(unpacked));
  // Something else was asked, or shown, while this was unpacked.
  if (own !== turn) return;
  byId("state").textContent = "";
  document.body.classList.remove("outdated");
  pointNowhere();
  clicked = null;
  byId("schedules").replaceChildren();
  timelines = data.map((schedule, index) => new Timeline(new Schedule(schedule, columns[index]), view, byId("schedules")));
  if (timelines.length === 2) timelines.forEach((each, index) => { each.other = timelines[1 - index]; });
  all = {
    from: Math.min(...timelines.map((each) => each.schedule.from)),
    to: Math.max(...timelines.map((each) => each.schedule.to)),
  };
  if (all.to === all.from) all.to += 1;
  // One scale for what is counted in one unit.
  for (const timeline of timelines) {
    const alike = timelines.filter((each) => each.schedule.memoryUnit === timeline.schedule.memoryUnit);
    timeline.mostMemory = Math.max(...alike.map((each) => each.schedule.peak));
  }
  timelines.forEach(listen);
  byId("microbatch").max = mostFlights();
  const run = timelines.find((each) => each.schedule.role === "measured");
  run?.addErrors();
  byId("compared").hidden = !run;
  byId("differ").hidden = run || !timelines.some((each) => each.schedule.differs);
  byId("arrange").hidden = timelines.length < 2;
  readState();
  setControls();
  legend();
  drawAll();
  // Who needs what is only asked when something is pointed at.
  setTimeout(() => timelines.forEach((each) => each.schedule.count && each.schedule.usersOf(0)));
}
const mostFlights = () => Math.max(...timelines.map((each) => each.schedule.flights.length));

// The address follows when the view has been at rest for so many milliseconds.
const REST = 200;
let frame = 0, resting = 0;
function redraw() {
  frame ||= requestAnimationFrame(drawAll);
}
function drawAll() {
  cancelAnimationFrame(frame);
  frame = 0;
  for (const timeline of timelines) timeline.draw();
  if (sceneOf() !== scene) legend();
  const { seconds } = timelines[0].schedule;
  byId("range").textContent = `${timeText(view.from, seconds, view.to, 6)} to ${timeText(view.to, seconds, view.to, 6)}`;
  repoint();
  // Browsers take long to change an address, and refuse it when asked too often.
  clearTimeout(resting);
  resting = setTimeout(writeState, REST);
}

function setRange(from, to) {
  const span = Math.min(Math.max(to - from, (all.to - all.from) * 1e-5), all.to - all.from);
  view.from = Math.min(Math.max(from, all.from), all.to - span);
  view.to = view.from + span;
}
function show(from, to) {
  setRange(from, to);
  redraw();
}
const span = () => view.to - view.from;
const move = (time) => show(view.from + time, view.to + time);
// What stays where it is when keys zoom: what they point at, or what was clicked, or the middle.
function anchor() {
  const { timeline, box, idle } = cursor ?? clicked ?? {};
  if (!timeline || !timelines.includes(timeline)) return (view.from + view.to) / 2;
  const { boxStart, boxEnd, idleStart, idleEnd } = timeline.schedule;
  const [first, last] = box === undefined ? [idleStart[idle], idleEnd[idle]] : [boxStart[box], boxEnd[box]];
  // As far as it is in sight.
  const [from, to] = [Math.max(first, view.from), Math.min(last, view.to)];
  return from <= to ? (from + to) / 2 : (first + last) / 2;
}
function zoom(factor, at = anchor()) {
  const width = Math.min(span() * factor, all.to - all.from);
  const from = at - (at - view.from) * (width / span());
  show(from, from + width);
}
function zoomRows(factor) {
  view.rows = Math.min(Math.max(view.rows * factor, 1), MOST_ROWS);
  redraw();
}
function fit() {
  view.rows = 1;
  show(all.from, all.to);
}

// The microbatch in flight, the same place in every schedule's order of first starts; 0 is all of them.
function choose(number) {
  view.chosen = number;
  setControls();
  redraw();
}
function flightText({ schedule }, chosen) {
  const flight = schedule.flights[chosen - 1];
  if (!flight) return "none";
  const others = schedule.flights.filter((each) => each.start <= flight.start && each.end > flight.start).length;
  return `${flight.name}: ${schedule.time(flight.start, flight.end)} to ${schedule.time(flight.end)}, ${others} in flight as it starts`;
}

// The controls, as the view is.
function setControls() {
  byId("microbatch").value = view.chosen;
  byId("flight").textContent = view.chosen ? timelines.map((each) => flightText(each, view.chosen)).join(" | ") : "all";
  for (const name of Object.keys(SWITCHES)) byId(name).checked = view[name];
  byId("schedules").className = view.stacked ? "stacked" : "";
  byId("arrange").textContent = view.stacked ? "side by side" : "one above the other";
}

// How far a pointer may move and still mean a click: a finger is not as steady as a mouse.
const STEADY = { mouse: 4, touch: 10, pen: 6 };

// A mouse drags the picture. One finger moves it in time, while the browser scrolls; two fingers zoom.
function listen(timeline) {
  const { over, scroll } = timeline;
  const pointers = new Map();
  let drag = null, pinch = null, last = "mouse";
  const middle = () => {
    const [a, b] = [...pointers.values()];
    return { x: (a.x + b.x) / 2 - over.getBoundingClientRect().left, apart: Math.max(Math.hypot(a.x - b.x, a.y - b.y), 1) };
  };
  over.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    over.setPointerCapture(event.pointerId);
    last = event.pointerType;
    const { clientX: x, clientY: y } = event;
    pointers.set(event.pointerId, { x, y });
    drag = pointers.size === 1 ? { x, y, from: view.from, top: scroll.scrollTop, moved: false } : null;
    pinch = pointers.size === 2 ? { apart: middle().apart, span: span(), time: timeline.time(middle().x) } : null;
  });
  over.addEventListener("pointermove", (event) => {
    const { clientX: x, clientY: y } = event;
    if (pointers.has(event.pointerId)) pointers.set(event.pointerId, { x, y });
    if (pinch) return spread(pinch, middle());
    if (!drag) {
      if (pointers.size) return;
      cursor = null;
      return pointAtPointer(timeline, event);
    }
    drag.moved ||= Math.hypot(x - drag.x, y - drag.y) > STEADY[event.pointerType];
    if (!drag.moved) return;
    pointNowhere();
    const from = drag.from - (x - drag.x) / timeline.scale;
    if (event.pointerType === "mouse") scroll.scrollTop = drag.top - (y - drag.y);
    show(from, from + span());
  });
  // What was between two fingers stays there.
  function spread({ apart, span, time }, now) {
    pointNowhere();
    const width = Math.min(span * apart / now.apart, all.to - all.from);
    const from = time - (now.x - timeline.left) * width / (timeline.width - timeline.left - timeline.right);
    show(from, from + width);
  }
  const lift = (event) => {
    pointers.delete(event.pointerId);
    pinch = drag = null;
  };
  over.addEventListener("pointerup", (event) => {
    const isClick = drag && !drag.moved;
    lift(event);
    if (!isClick) return;
    cursor = null;
    pointAtPointer(timeline, event);
    chooseBox(timeline, timeline.pointed?.box);
  });
  over.addEventListener("pointercancel", lift);
  over.addEventListener("pointerleave", (event) => { if (!cursor && event.pointerType === "mouse") pointNowhere(); });
  over.addEventListener("blur", () => { if (cursor) pointNowhere(); });
  over.addEventListener("dblclick", () => { if (last === "mouse") fit(); });
  over.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey && !event.deltaX ? event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(event.deltaY * 0.0025), timeline.time(event.offsetX));
    else if (Math.abs(sideways) > 0) move(sideways / timeline.scale);
    else return; // The rows scroll.
    event.preventDefault();
  }, { passive: false });
  over.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key in steps) step(timeline, ...steps[event.key]);
    else if (event.key === "Enter" && cursor) chooseBox(timeline, cursor.box);
    else return;
    event.preventDefault();
  });
  scroll.addEventListener("scroll", redraw);
}
// The op that was clicked last.
let clicked = null;
function chooseBox(timeline, box) {
  const { schedule } = timeline;
  clicked = box === undefined ? null : { timeline, box };
  choose(box === undefined ? 0 : schedule.flights.indexOf(schedule.flight(box)) + 1);
}

const keys = {
  w: () => zoom(0.7), "+": () => zoom(0.7), "=": () => zoom(0.7), s: () => zoom(1 / 0.7), "-": () => zoom(1 / 0.7),
  a: () => move(-span() / 8), d: () => move(span() / 8), 0: fit, r: () => zoomRows(1.5), f: () => zoomRows(1 / 1.5),
  c: () => byId("path").click(),
  // First what is pointed at, then what is chosen.
  Escape: () => byId("tip").hidden ? choose(0) : pointNowhere(),
};
addEventListener("keydown", (event) => {
  const isText = event.target.matches("input:not([type=range]):not([type=checkbox])");
  if (event.ctrlKey || event.metaKey || event.altKey || isText) return;
  keys[event.key]?.();
});

// What the legend says: a name, and its swatches.
function legendEntries() {
  const isDense = timelines.every((each) => each.isDense);
  const { colours } = timelines[0], plain = (ground) => ({ pattern: "plain", ink: ground, ground });
  const kinds = new Map();
  for (const { schedule, hatched } of timelines) {
    for (const [kind, look] of Object.entries(schedule.kinds)) {
      const swatches = look.step ? [plain(colours.ink)] : [...new Set(look.fills)].map((fill) =>
        isDense || !hatched?.[kind] ? plain(fill) : { pattern: look.pattern, ink: look.lines[look.fills.indexOf(fill)], ground: fill });
      if ((kinds.get(look.name)?.length ?? 0) < swatches.length) kinds.set(look.name, swatches);
    }
  }
  const entries = [...kinds].map(([name, swatches]) => ({ name, swatches }));
  if (entries.some(({ swatches }) => swatches.length > 1)) entries.push({ name: "light to dark: the chunks of a rank", swatches: [] });
  for (const note of new Set(timelines.flatMap((each) => each.schedule.labelNotes))) entries.push({ name: note, swatches: [] });
  const versions = timelines.find((each) => each.schedule.versions.length)?.schedule.versions;
  if (versions) entries.push({ name: `strip: version of the weights, modulo ${versions.length}`, swatches: versions.map(plain) });
  if (view.causes) entries.push(...causeEntries(colours, isDense));
  if (isDense) entries.push({ name: "each column: the shares of its time", swatches: [] });
  if (view.memory && !timelines.some((each) => each.hasMemory)) {
    entries.push({ name: "memory: in higher rows (r)", swatches: [] });
  }
  if (view.path) entries.push({ name: "critical path", swatches: [plain(colours.path)] });
  if (timelines.some((each) => each.showsErrors())) {
    entries.push(...ERRORS.map(({ name, fill }) => ({ name, swatches: [plain(fill)] })));
  } else if (timelines.some((each) => each.schedule.differs)) {
    entries.push({ name: "only in this schedule", swatches: [plain(colours.only)] }, { name: "moved", swatches: [plain(colours.moved)] });
  }
  return entries;
}
// Idle time by its cause, with the share that each cause has of it in each schedule.
function causeEntries(colours, isDense) {
  const sums = timelines.map((each) => each.schedule.causeTimes.reduce((a, b) => a + b, 0));
  return looks.causes.flatMap(([cause], index) => {
    const times = timelines.map((each) => each.schedule.causeTimes[index]);
    if (!times.some((time) => time > 0)) return [];
    const swatchOf = (cause) => isDense ? { pattern: "plain", ink: cause.dense, ground: cause.dense } : cause;
    const shares = times.map((time, at) => sums[at] ? percent(time / sums[at]) : "0%");
    return [{ name: `idle: ${cause} ${shares.join(" | ")}`, swatches: [swatchOf(colours.causes[index])], meaning: looks.causes[index][1] }];
  });
}
// How fine the picture is drawn, on which the legend depends.
let scene = "";
const sceneOf = () => JSON.stringify(timelines.map(({ isDense, hasMemory, hatched }) => [isDense, hasMemory, hatched]));
function legend() {
  scene = sceneOf();
  timelines.forEach((each) => { each.colours = theme(); });
  byId("legend").replaceChildren(...legendEntries().map(({ name, swatches, meaning }) => {
    const item = Object.assign(document.createElement("span"), { title: meaning ?? "" });
    for (const { pattern, ink, ground } of swatches) {
      const swatch = item.appendChild(document.createElement("i"));
      swatch.style.background = pattern === "plain" ? ground : `url(${tile(pattern, ink, ground).toDataURL()}) 0 0 / ${looks.tile}px`;
    }
    item.append(name);
    return item;
  }));
}

byId("in").onclick = () => zoom(0.5);
byId("out").onclick = () => zoom(2);
byId("fit").onclick = fit;
byId("higher").onclick = () => zoomRows(1.5);
byId("lower").onclick = () => zoomRows(1 / 1.5);
for (const name of Object.keys(SWITCHES)) {
  byId(name).onchange = (event) => {
    view[name] = event.target.checked;
    legend();
    redraw();
  };
}
byId("fold").onclick = () => {
  const isOpen = document.body.classList.toggle("unfolded");
  byId("fold").setAttribute("aria-expanded", isOpen);
};
byId("microbatch").oninput = (event) => choose(Number(event.target.value));
byId("arrange").onclick = () => {
  view.stacked = !view.stacked;
  setControls();
  redraw();
};
for (const ending of ["svg", "png"]) byId(ending).onclick = () => save(ending);
DARK.addEventListener("change", () => { legend(); redraw(); });
new ResizeObserver(() => { if (timelines.length) redraw(); }).observe(byId("schedules"));
// An editor that shows this page says so when its text has changed.
addEventListener("message", ({ data }) => {
  if (typeof data?.outdate === "string") outdate(data.outdate);
});
addEventListener("hashchange", () => {
  readState();
  setControls();
  legend();
  redraw();
});
present(JSON.parse(byId("data").textContent)).then(() => performance.mark("drawn"));
