// One schedule on the page. Two canvases lie on each other: on the lower one are the rows, drawn anew when another part
// of the schedule is seen; on the upper one what changes with the pointer. Both are as large as what is seen, so the
// number of boxes costs nothing but a search per row.

const LEFT = 62, RIGHT = 74, AXIS = 22, STRIP = 4, MARK = 3, LANE = 9;
// The distance of rows: least where all ranks are in sight, and most; and how much of it memory needs.
const LEAST_PITCH = 3, MOST_PITCH = 100, WITH_MEMORY = 30;

class Timeline {
  constructor(schedule, view, parent) {
    this.schedule = schedule;
    this.view = view;
    schedule.pair = this;
    this.build(parent);
  }

  build(parent) {
    const { title, figures, wrong } = this.schedule;
    const section = this.section = parent.appendChild(document.createElement("section"));
    const heading = section.appendChild(document.createElement("h2"));
    heading.append(title, Object.assign(document.createElement("small"), { textContent: figures }));
    for (const text of wrong) Object.assign(section.appendChild(document.createElement("p")), { className: "wrong", textContent: text });
    section.appendChild(this.table());
    this.scroll = section.appendChild(document.createElement("div"));
    this.scroll.className = "scroll";
    const stack = this.scroll.appendChild(document.createElement("div"));
    stack.className = "stack";
    this.canvas = stack.appendChild(document.createElement("canvas"));
    this.over = stack.appendChild(document.createElement("canvas"));
    this.canvas.setAttribute("aria-hidden", "true");
    this.over.tabIndex = 0;
    this.over.setAttribute("role", "application");
    this.over.setAttribute("aria-roledescription", "timeline");
    this.over.setAttribute("aria-label", `${title}: ${figures}`);
    this.over.setAttribute("aria-describedby", "keys");
    this.spacer = this.scroll.appendChild(document.createElement("div"));
    this.stack = stack;
  }

  // The figures of each rank, for who reads rather than looks.
  table() {
    const { schedule } = this, details = document.createElement("details");
    details.appendChild(document.createElement("summary")).textContent = "figures of each rank";
    const scroll = details.appendChild(document.createElement("div"));
    scroll.className = "figures";
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", `figures of each rank of ${schedule.title}`);
    const seen = looks.causes.map((_, cause) => cause).filter((cause) => schedule.causeTimes[cause] > 0);
    const head = ["rank", "idle", `peak memory (${schedule.memoryUnit})`, ...seen.map((cause) => `idle: ${looks.causes[cause][0]}`)];
    const rows = schedule.idle.map((idle, rank) => {
      const times = new Float64Array(looks.causes.length), { first, stop } = schedule.idleRows[rank];
      for (let part = first; part < stop; part++) times[schedule.cause[part]] += schedule.idleEnd[part] - schedule.idleStart[part];
      return [rank, `${(idle * 100).toFixed(1)}%`, schedule.amount(schedule.peaks[rank]), ...seen.map((cause) => schedule.time(times[cause]))];
    });
    const table = scroll.appendChild(document.createElement("table"));
    const line = (cells, name) => {
      const row = table.appendChild(document.createElement("tr"));
      for (const cell of cells) row.appendChild(document.createElement(name)).textContent = cell;
    };
    line(head, "th");
    for (const row of rows) line(row, "td");
    return details;
  }

  // Geometry: all in pixels of the page.
  measure() {
    this.place(this.scroll.clientWidth, this.scroll.clientHeight);
    this.spacer.style.height = `${Math.max(AXIS + this.schedule.ranks * this.pitch - this.height, 0)}px`;
    this.stack.style.height = `${this.height}px`;
  }
  place(width, height) {
    const { schedule, view } = this, lanes = LANE * ((schedule.copies.length ? 1 : 0) + schedule.lanes.length);
    this.width = width;
    this.height = height;
    const fitting = Math.max((height - AXIS - 4) / schedule.ranks, LEAST_PITCH);
    const most = view.memory ? MOST_PITCH : 44 + lanes;
    this.pitch = Math.min(fitting, most) * view.rows;
    if (this.pitch > 8) this.pitch = Math.floor(this.pitch);
    const hasMemory = this.hasMemory = view.memory && this.pitch >= WITH_MEMORY + lanes;
    const gap = this.pitch < 12 ? 1 : 4;
    this.lane = this.pitch > 15 + lanes ? lanes : 0;
    this.barHeight = hasMemory ? Math.floor((this.pitch - lanes) * 0.55) : Math.max(this.pitch - this.lane - gap, 2);
    this.memoryTop = this.barHeight + this.lane + 2;
    this.memoryHeight = this.pitch - this.memoryTop - 5;
    this.scale = (width - LEFT - RIGHT) / (view.to - view.from);
  }
  get top() { return this.drawsAll ? 0 : this.scroll.scrollTop; }
  x(time) { return LEFT + (time - this.view.from) * this.scale; }
  time(x) { return this.view.from + (x - LEFT) / this.scale; }
  y(rank) { return AXIS + rank * this.pitch - this.top; }
  middle(box) {
    const isOp = box < this.schedule.firstCopy;
    return this.y(this.schedule.rank[box]) + (isOp ? this.barHeight / 2 : this.barHeight + 5);
  }
  // The ranks that are in sight.
  shown() {
    const first = Math.floor(this.top / this.pitch);
    const stop = Math.ceil((this.top + this.height - AXIS) / this.pitch);
    return { first, stop: Math.min(stop, this.schedule.ranks) };
  }
  // The rows from `first` up to `stop` that are seen, by the times at which each starts and ends.
  seenOf({ first, stop }, starts, ends) {
    const begin = firstWhere(first, stop, (each) => ends[each] >= this.view.from);
    return { first: begin, stop: firstWhere(begin, stop, (each) => starts[each] > this.view.to) };
  }
  visible(row) { return this.seenOf(row, this.schedule.start, this.schedule.end); }

  draw() {
    this.measure();
    this.colours = theme();
    this.drawOn(layer(this.canvas, this.width, this.height));
    this.drawOver();
  }

  // All but what changes with the pointer, on a canvas or as an SVG.
  drawOn(pen) {
    const { view, width, height } = this, { first, stop } = this.shown();
    this.pen = pen;
    this.chosen = this.schedule.flights[view.chosen - 1] ?? null;
    this.seen = 0;
    pen.fillStyle = this.colours.paper;
    pen.fillRect(0, 0, width, height);
    for (let rank = first; rank < stop; rank++) this.drawFrame(rank);
    this.clipped(() => {
      for (let rank = first; rank < stop; rank++) this.drawRank(rank);
      if (view.arrows) this.drawTransfers(first, stop);
      if (view.path) this.drawPath();
    });
    this.drawAxis();
  }
  clipped(draws) {
    const { pen } = this;
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, 0, this.width - LEFT - RIGHT, this.height);
    pen.clip();
    draws();
    pen.restore();
  }

  // What stands beside a rank: its number, its idle time, the most it holds; of low rows only some.
  drawFrame(rank) {
    const { pen, colours, schedule } = this, y = this.y(rank), middle = y + this.barHeight / 2;
    pen.fillStyle = colours.row;
    pen.fillRect(LEFT, y, this.width - LEFT - RIGHT, this.barHeight);
    if (this.pitch > 12) {
      pen.strokeStyle = colours.line;
      pen.lineWidth = 1;
      pen.strokeRect(LEFT + 0.5, y + 0.5, this.width - LEFT - RIGHT - 1, this.barHeight - 1);
    }
    const every = Math.max(1, 2 ** Math.ceil(Math.log2(12 / this.pitch)));
    if (rank % every) return;
    pen.font = `${this.pitch < 14 ? 10 : 12}px ${FONT}`;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const wrong = schedule.wrongRanks.includes(rank);
    pen.fillStyle = wrong ? colours.needs : colours.ink;
    const stages = schedule.stagesBeside[rank] ?? "", isBelow = stages && this.barHeight >= 22 && stages.length * 4.6 < LEFT - 10;
    pen.fillText(wrong ? `rank ${rank}!` : `rank ${rank}`, LEFT - 8, isBelow ? middle - 6 : middle);
    if (isBelow) {
      pen.font = `9px ${FONT}`;
      pen.fillStyle = colours.muted;
      pen.fillText(stages, LEFT - 8, middle + 7);
      pen.font = `12px ${FONT}`;
    }
    pen.textAlign = "left";
    pen.fillStyle = colours.muted;
    pen.fillText(`${percent(schedule.idle[rank])} idle`, this.width - RIGHT + 8, middle);
    if (this.hasMemory) this.drawMemoryAxis(rank, y + this.memoryTop);
    if (this.lane) this.drawResources(y);
  }

  drawRank(rank) {
    const y = this.y(rank), { schedule } = this;
    if (this.chosen) this.drawFlight(rank, y);
    this.drawRow(rank, y);
    if (this.lane && schedule.copies.length) this.drawBoxes(this.visible(schedule.copies[rank]), y + this.barHeight + 2, LANE - 2);
    if (this.lane) this.drawComponents(rank, y);
    if (this.hasMemory) this.drawMemory(rank, y + this.memoryTop);
  }

  // What is at a point of the canvas: a rank and a time there, with a box, or a part of idle time.
  at(x, y) {
    const { schedule } = this, rank = Math.floor((y - AXIS + this.top) / this.pitch);
    if (y < AXIS || rank < 0 || rank >= schedule.ranks || x < LEFT || x > this.width - RIGHT) return undefined;
    const time = this.time(x), near = MARK / this.scale, below = y - this.y(rank);
    if (below > this.barHeight + this.lane + 1) return this.hasMemory ? { rank, time, memory: true } : { rank, time };
    const lane = below <= this.barHeight ? NONE : this.laneAt(below);
    if (lane !== NONE) {
      const component = schedule.componentAt(lane, rank, time);
      return { rank, time, lane, component, box: schedule.laneBox[component] };
    }
    const row = below <= this.barHeight ? schedule.ops[rank] : schedule.copies[rank];
    const box = row && schedule.boxAt(row, time, near);
    const idle = box === undefined && below <= this.barHeight ? schedule.idleAt(rank, time) : undefined;
    return { rank, time, box, idle };
  }
}

// The pen of a canvas of some size in pixels of the page, emptied.
function layer(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const wide = Math.round(width * ratio), high = Math.round(height * ratio);
  if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}
