// One schedule on the page. Two canvases lie on each other: on the lower one are the rows, drawn anew when another part
// of the schedule is seen; on the upper one what changes with the pointer. Both are as large as what is seen, so the
// number of boxes costs nothing but a search per row.

// What stands beside the rows and above them; in windows for which that is too much, less of it.
const LEFT = 62, RIGHT = 74, AXIS = 22, NARROW = { width: 400, left: 30, right: 40 };
const STRIP = 4, MARK = 3, LANE = 9;
// The distance of rows: least where all ranks are in sight; most, with memory and without, also as a share of the height;
// and how much of it memory needs.
const LEAST_PITCH = 3, MOST_PITCH = { memory: [100, 1 / 6], rows: [44, 1 / 10] }, WITH_MEMORY = 30;
// A window of this size has letters of the sizes that stand here; in larger ones they grow, up to so many times.
const USUAL = { width: 1500, height: 800, most: 2.2 };

class Timeline {
  constructor(schedule, view, parent) {
    this.schedule = schedule;
    this.view = view;
    schedule.pair = this;
    this.build(parent);
  }

  build(parent) {
    const { title, figures, wrong, ranks } = this.schedule;
    const section = this.section = parent.appendChild(document.createElement("section"));
    section.style.setProperty("--ranks", ranks);
    const head = this.head = section.appendChild(document.createElement("div"));
    const heading = head.appendChild(document.createElement("h2"));
    heading.append(title, Object.assign(document.createElement("small"), { textContent: figures }));
    for (const text of wrong) Object.assign(head.appendChild(document.createElement("p")), { className: "wrong", textContent: text });
    head.appendChild(this.table());
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
    const { schedule } = this;
    const seen = looks.causes.map((_, cause) => cause).filter((cause) => schedule.causeTimes[cause] > 0);
    const head = ["rank", "idle", `peak memory (${schedule.memoryUnit})`, ...seen.map((cause) => `idle: ${looks.causes[cause][0]}`)];
    const rows = schedule.idle.map((idle, rank) => {
      const times = new Float64Array(looks.causes.length), { first, stop } = schedule.idleRows[rank];
      for (let part = first; part < stop; part++) times[schedule.cause[part]] += schedule.idleEnd[part] - schedule.idleStart[part];
      return [rank, `${(idle * 100).toFixed(1)}%`, schedule.amount(schedule.peaks[rank]), ...seen.map((cause) => schedule.time(times[cause]))];
    });
    return detailsOf("figures of each rank", `figures of each rank of ${schedule.title}`, [head, ...rows]);
  }

  // Geometry: all in pixels of the page.
  measure() {
    this.place(this.scroll.clientWidth, this.scroll.clientHeight);
    this.spacer.style.height = `${Math.max(this.axis + this.schedule.ranks * this.pitch - this.height, 0)}px`;
    this.stack.style.height = `${this.height}px`;
  }
  place(width, height) {
    const { schedule, view } = this, lanes = LANE * ((schedule.copies.length ? 1 : 0) + schedule.lanes.length);
    this.width = width;
    this.height = height;
    this.top = this.isOnPaper ? 0 : this.scroll.scrollTop;
    // As in the rest of the page, however many schedules stand beside each other.
    const wide = this.isOnPaper ? width : innerWidth;
    this.big = Math.min(Math.max(Math.min(wide / USUAL.width, height / USUAL.height), 1), USUAL.most);
    this.isNarrow = width < NARROW.width;
    this.left = this.isNarrow ? NARROW.left : Math.round(LEFT * this.big);
    this.right = this.isNarrow ? NARROW.right : Math.round(RIGHT * this.big);
    this.axis = Math.round(AXIS * this.big);
    const fitting = Math.max((height - this.axis - 4) / schedule.ranks, LEAST_PITCH);
    const [most, share] = MOST_PITCH[view.memory ? "memory" : "rows"];
    this.pitch = Math.min(fitting, Math.max(most + (view.memory ? 0 : lanes), height * share)) * view.rows;
    if (this.pitch > 8) this.pitch = Math.floor(this.pitch);
    const hasMemory = this.hasMemory = view.memory && this.pitch >= WITH_MEMORY + lanes;
    const gap = this.pitch < 12 ? 1 : 4;
    this.lane = this.pitch > 15 + lanes ? lanes : 0;
    this.barHeight = hasMemory ? Math.floor((this.pitch - lanes) * 0.55) : Math.max(this.pitch - this.lane - gap, 2);
    this.memoryTop = this.barHeight + this.lane + 2;
    this.memoryHeight = this.pitch - this.memoryTop - 5;
    this.scale = (width - this.left - this.right) / (view.to - view.from);
  }
  // How high all rows are with the axis above them, as far as they are in sight.
  get contentHeight() {
    return Math.min(this.height, Math.ceil(this.axis + this.schedule.ranks * this.pitch - this.top));
  }
  font(size) { return `${size * this.big}px ${FONT}`; }
  x(time) { return this.left + (time - this.view.from) * this.scale; }
  time(x) { return this.view.from + (x - this.left) / this.scale; }
  y(rank) { return this.axis + rank * this.pitch - this.top; }
  // Ops that share a box have a part of its height.
  heightOf(box) { return box < this.schedule.firstCopy ? this.barHeight / this.schedule.parts[box] : LANE - 2; }
  middle(box) {
    const { firstCopy, rank, part } = this.schedule;
    return this.y(rank[box]) + (box < firstCopy ? this.heightOf(box) * (part[box] + 0.5) : this.barHeight + 5);
  }
  // The ranks that are in sight.
  shown() {
    const first = Math.floor(this.top / this.pitch);
    const stop = Math.ceil((this.top + this.height - this.axis) / this.pitch);
    return { first, stop: Math.min(stop, this.schedule.ranks) };
  }
  // The rows from `first` up to `stop` that are seen, by the times at which each starts and ends.
  seenOf({ first, stop }, starts, ends) {
    const begin = firstWhere(first, stop, (each) => ends[each] >= this.view.from);
    return { first: begin, stop: firstWhere(begin, stop, (each) => starts[each] > this.view.to) };
  }
  visible(row) { return this.seenOf(row, this.schedule.boxStart, this.schedule.boxEnd); }

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
    this.fills = this.bandFills();
    this.hatched = this.hatchedKinds();
    this.seen = 0;
    this.isDense = false;
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
    pen.rect(this.left, 0, this.width - this.left - this.right, this.height);
    pen.clip();
    draws();
    pen.restore();
  }

  // What stands beside a rank: its number, its idle time, the most it holds; of low rows only some.
  drawFrame(rank) {
    const { pen, colours, schedule } = this, y = this.y(rank), middle = y + this.barHeight / 2;
    pen.fillStyle = colours.row;
    pen.fillRect(this.left, y, this.width - this.left - this.right, this.barHeight);
    if (this.pitch > 12) {
      pen.strokeStyle = colours.line;
      pen.lineWidth = 1;
      pen.strokeRect(this.left + 0.5, y + 0.5, this.width - this.left - this.right - 1, this.barHeight - 1);
    }
    const every = Math.max(1, 2 ** Math.ceil(Math.log2(12 * this.big / this.pitch)));
    if (rank % every) return;
    pen.font = this.font(this.pitch < 14 ? 10 : 12);
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    const wrong = schedule.wrongRanks.includes(rank);
    pen.fillStyle = wrong ? colours.needs : colours.ink;
    const name = this.isNarrow ? String(rank) : `rank ${rank}`, stages = schedule.stagesBeside[rank] ?? "";
    const isBelow = stages && this.barHeight >= 22 && stages.length * 4.6 < this.left - 10;
    pen.fillText(wrong ? `${name}!` : name, this.left - 8, isBelow ? middle - 6 : middle);
    if (isBelow) {
      const { font } = pen;
      pen.font = `9px ${FONT}`;
      pen.fillStyle = colours.muted;
      pen.fillText(stages, this.left - 8, middle + 7);
      pen.font = font;
    }
    pen.textAlign = "left";
    pen.fillStyle = colours.muted;
    const idle = percent(schedule.idle[rank]);
    pen.fillText(this.isNarrow ? idle : `${idle} idle`, this.width - this.right + 8, middle);
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
    const { schedule } = this, rank = Math.floor((y - this.axis + this.top) / this.pitch);
    if (y < this.axis || rank < 0 || rank >= schedule.ranks || x < this.left || x > this.width - this.right) return undefined;
    const time = this.time(x), near = MARK / this.scale, below = y - this.y(rank);
    if (below > this.barHeight + this.lane + 1) return this.hasMemory ? { rank, time, memory: true } : { rank, time };
    const lane = below <= this.barHeight ? NONE : this.laneAt(below);
    if (lane !== NONE) {
      const component = schedule.componentAt(lane, rank, time);
      return { rank, time, lane, component, box: schedule.laneBox[component] };
    }
    const isOp = below <= this.barHeight, row = isOp ? schedule.ops[rank] : schedule.copies[rank];
    let box = row && schedule.boxAt(row, time, near);
    if (box !== undefined && isOp && !this.isDense) box = schedule.partAt(box, below / this.barHeight);
    const idle = box === undefined && isOp ? schedule.idleAt(rank, time) : undefined;
    return { rank, time, box, idle };
  }
}

// A table below its title, to be opened; the first of its lines has the names of the columns.
function detailsOf(title, name, [head, ...lines]) {
  const details = document.createElement("details");
  details.appendChild(document.createElement("summary")).textContent = title;
  const scroll = details.appendChild(document.createElement("div"));
  scroll.className = "figures";
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", name);
  const table = scroll.appendChild(document.createElement("table"));
  const add = (cells, tag) => {
    const row = table.appendChild(document.createElement("tr"));
    for (const cell of cells) row.appendChild(document.createElement(tag)).textContent = cell;
  };
  add(head, "th");
  for (const line of lines) add(line, "td");
  return details;
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
