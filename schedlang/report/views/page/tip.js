// What is pointed at, with the pointer or with the keys: what is written of it at the side, and said to who cannot see it.

const pointer = { timeline: null, x: 0, y: 0 };

// Point at what stands somewhere in a schedule, or at nothing.
function point(timeline, what) {
  for (const each of timelines) {
    const before = each.pointed;
    each.pointed = each === timeline ? what : undefined;
    const linked = each.linked;
    each.linked = what && each !== timeline ? linkOf(timeline, what, each) : undefined;
    if (before !== each.pointed || linked !== each.linked) overFrame(each);
  }
  const lines = what && linesOf(timeline, what);
  const tip = byId("tip");
  tip.hidden = !lines;
  byId("keys").hidden = Boolean(lines);
  if (!lines) return;
  const [word, ...more] = lines;
  const source = what.box === undefined ? [] : [element("code", more.pop())];
  tip.replaceChildren(element("b", word), ...more.map((text) => element("div", text)), ...source);
}
// What another schedule shows of it: the same time, and of two schedules the same op.
function linkOf(timeline, { time, box }, other) {
  return { time, box: timeline.other === other ? timeline.schedule.twin(box) : NONE };
}
function linesOf({ schedule }, { rank, time, box, idle, memory, lane, component }) {
  if (component !== undefined) return schedule.describeComponent(lane, component);
  if (box !== undefined) return schedule.describe(box);
  const held = `rank ${rank} holds ${schedule.amount(schedule.held(rank, time))}${unitName(schedule)} at ${schedule.time(time)}`;
  if (memory) return [held, `its peak is ${schedule.amount(schedule.peaks[rank])}`];
  return idle === undefined ? undefined : [...schedule.describeIdle(idle, time), held];
}
const unitName = ({ memoryUnit }) => memoryUnit === "bytes" ? "" : ` ${memoryUnit}`;
function element(name, text) {
  return Object.assign(document.createElement(name), { textContent: text });
}

// Only the canvas that changes with the pointer is drawn, once a frame.
function overFrame(timeline) {
  timeline.overFrame ||= requestAnimationFrame(() => {
    timeline.overFrame = 0;
    timeline.drawOver();
  });
}

function pointAtPointer(timeline, event) {
  pointer.timeline = timeline;
  [pointer.x, pointer.y] = [event.clientX, event.clientY];
  repoint();
}
// After zoom or scroll, something else is under the pointer, which has not moved.
function repoint() {
  const { timeline, x, y } = pointer;
  if (cursor) return pointAtCursor();
  if (!timeline) return;
  const { left, top } = timeline.over.getBoundingClientRect();
  point(timeline, timeline.at(x - left, y - top));
}
function pointNowhere() {
  pointer.timeline = cursor = null;
  point(null);
}

// The cursor of the keys: an op or a part of idle time of a rank.
let cursor = null;

function pointAtCursor() {
  const { timeline, rank, box, idle } = cursor, { schedule } = timeline;
  const start = box === undefined ? schedule.idleStart[idle] : schedule.start[box];
  const time = box === undefined ? (start + schedule.idleEnd[idle]) / 2 : start;
  point(timeline, { rank, time, box, idle });
}
function setCursor(timeline, rank, at) {
  if (!at) return;
  cursor = { timeline, rank, ...at };
  const { schedule } = timeline;
  const start = at.box === undefined ? schedule.idleStart[at.idle] : schedule.start[at.box];
  if (start < view.from || start >= view.to) show(start - span() / 2, start + span() / 2);
  const y = timeline.y(rank);
  if (y < timeline.axis || y + timeline.pitch > timeline.height) timeline.scroll.scrollTop = rank * timeline.pitch - timeline.height / 2;
  pointAtCursor();
  byId("said").textContent = linesOf(timeline, { rank, time: start, ...at }).join(". ");
}

// What begins next on a rank, after a time or before it: an op, or a part of idle time.
function nextOn({ schedule }, rank, time) {
  const row = schedule.ops[rank], parts = schedule.idleRows[rank];
  const box = firstWhere(row.first, row.stop, (each) => schedule.start[each] > time);
  const idle = firstWhere(parts.first, parts.stop, (each) => schedule.idleStart[each] > time);
  return sooner(schedule, box < row.stop ? box : undefined, idle < parts.stop ? idle : undefined, 1);
}
function previousOn({ schedule }, rank, time) {
  const row = schedule.ops[rank], parts = schedule.idleRows[rank];
  const box = firstWhere(row.first, row.stop, (each) => schedule.start[each] >= time) - 1;
  const idle = firstWhere(parts.first, parts.stop, (each) => schedule.idleStart[each] >= time) - 1;
  return sooner(schedule, box >= row.first ? box : undefined, idle >= parts.first ? idle : undefined, -1);
}
function sooner(schedule, box, idle, sign) {
  if (box === undefined) return idle === undefined ? undefined : { idle };
  if (idle === undefined) return { box };
  return sign * (schedule.start[box] - schedule.idleStart[idle]) <= 0 ? { box } : { idle };
}
const cursorStart = ({ timeline: { schedule }, box, idle }) => box === undefined ? schedule.idleStart[idle] : schedule.start[box];

// One step of the cursor: along a rank, or to another rank at the same time.
function step(timeline, along, across) {
  const { schedule } = timeline;
  if (cursor?.timeline !== timeline) {
    const rank = timeline.shown().first;
    return setCursor(timeline, rank, nextOn(timeline, rank, view.from - 1e-9 * span()) ?? previousOn(timeline, rank, view.to));
  }
  const time = cursorStart(cursor);
  if (along) return setCursor(timeline, cursor.rank, (along > 0 ? nextOn : previousOn)(timeline, cursor.rank, time));
  const rank = Math.min(Math.max(cursor.rank + across, 0), schedule.ranks - 1);
  const box = schedule.boxAt(schedule.ops[rank], time), idle = schedule.idleAt(rank, time);
  const there = box !== undefined ? { box } : idle !== undefined ? { idle } : previousOn(timeline, rank, time) ?? nextOn(timeline, rank, time);
  setCursor(timeline, rank, there);
}
