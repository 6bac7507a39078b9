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
  byId("differ").hidden = !timelines.some((each) => each.schedule.differs);
  byId("arrange").hidden = timelines.length < 2;
  readState();
  setControls();
  legend();
  drawAll();
  // Who needs what is only asked when something is pointed at.
  setTimeout(() => timelines.forEach((each) => each.schedule.count && each.schedule.usersOf(0)));
}
const mostFlights = () => Math.max(...timelines.map((each) => each.schedule.flights.length));

let frame = 0;
function redraw() {
  frame ||= requestAnimationFrame(drawAll);
}
function drawAll() {
  cancelAnimationFrame(frame);
  frame = 0;
  for (const timeline of timelines) timeline.draw();
  const { seconds } = timelines[0].schedule;
  byId("range").textContent = `${timeText(view.from, seconds, view.to)} to ${timeText(view.to, seconds)}`;
  repoint();
  writeState();
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
function zoom(factor, at = (view.from + view.to) / 2) {
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

function listen(timeline) {
  const { over, scroll } = timeline;
  let drag = null;
  over.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    over.setPointerCapture(event.pointerId);
    drag = { x: event.clientX, y: event.clientY, from: view.from, top: scroll.scrollTop, moved: false };
  });
  over.addEventListener("pointermove", (event) => {
    if (!drag) {
      cursor = null;
      return pointAtPointer(timeline, event);
    }
    drag.moved ||= Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 4;
    if (!drag.moved) return;
    pointNowhere();
    const from = drag.from - (event.clientX - drag.x) / timeline.scale;
    scroll.scrollTop = drag.top - (event.clientY - drag.y);
    show(from, from + span());
  });
  over.addEventListener("pointerup", () => {
    if (drag && !drag.moved) chooseBox(timeline, timeline.pointed?.box);
    drag = null;
  });
  over.addEventListener("pointercancel", () => { drag = null; });
  over.addEventListener("pointerleave", () => { if (!cursor) pointNowhere(); });
  over.addEventListener("blur", () => { if (cursor) pointNowhere(); });
  over.addEventListener("dblclick", fit);
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
function chooseBox({ schedule }, box) {
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
  const { colours } = timelines[0], plain = (ground) => ({ pattern: "plain", ink: ground, ground });
  const kinds = new Map();
  for (const { schedule } of timelines) {
    for (const look of Object.values(schedule.kinds)) {
      const swatches = look.step ? [plain(colours.ink)] : [...new Set(look.fills)].map((fill) =>
        look.hatched ? { pattern: RECOMPUTED, ink: colours.paper, ground: fill } : plain(fill));
      if ((kinds.get(look.name)?.length ?? 0) < swatches.length) kinds.set(look.name, swatches);
    }
  }
  const entries = [...kinds].map(([name, swatches]) => ({ name, swatches }));
  if (entries.some(({ swatches }) => swatches.length > 1)) entries.push({ name: "light to dark: the chunks of a rank", swatches: [] });
  for (const note of new Set(timelines.flatMap((each) => each.schedule.labelNotes))) entries.push({ name: note, swatches: [] });
  const versions = timelines.find((each) => each.schedule.versions.length)?.schedule.versions;
  if (versions) entries.push({ name: `strip: version of the weights, modulo ${versions.length}`, swatches: versions.map(plain) });
  if (view.causes) entries.push(...causeEntries(colours));
  if (view.path) entries.push({ name: "critical path", swatches: [plain(colours.path)] });
  if (timelines.some((each) => each.schedule.differs)) {
    entries.push({ name: "only in this schedule", swatches: [plain(colours.only)] }, { name: "moved", swatches: [plain(colours.moved)] });
  }
  return entries;
}
// Idle time by its cause, with the share that each cause has of it in each schedule.
function causeEntries(colours) {
  const sums = timelines.map((each) => each.schedule.causeTimes.reduce((a, b) => a + b, 0));
  return looks.causes.flatMap(([cause], index) => {
    const times = timelines.map((each) => each.schedule.causeTimes[index]);
    if (!times.some((time) => time > 0)) return [];
    const shares = times.map((time, at) => sums[at] ? percent(time / sums[at]) : "0%");
    return [{ name: `idle: ${cause} ${shares.join(" | ")}`, swatches: [colours.causes[index]], meaning: looks.causes[index][1] }];
  });
}
function legend() {
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
byId("microbatch").oninput = (event) => choose(Number(event.target.value));
byId("arrange").onclick = () => {
  view.stacked = !view.stacked;
  setControls();
  redraw();
};
for (const ending of ["svg", "png"]) byId(ending).onclick = () => save(ending);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { legend(); redraw(); });
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
