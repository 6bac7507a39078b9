// One schedule on a canvas. The canvas is as large as what is seen of it and is drawn anew when that changes, so the
// number of boxes costs nothing but a search per row. Boxes are numbers: their data stand in columns (html.py),
// rank by rank in order of time, first all ops, then all copies to and from the host.

const LEFT = 62, RIGHT = 74, AXIS = 22, STRIP = 4, MARK = 3, SAME = 0, MOVED = 1;
const LEAST_PITCH = 30, MOST_PITCH = 100, MOST_ARROWS = 4000;

// The first of the numbers lo, lo + 1, ... below hi for which `holds` is true; it stays true from there on.
function firstWhere(lo, hi, holds) {
  while (lo < hi) {
    const middle = (lo + hi) >> 1;
    if (holds(middle)) hi = middle; else lo = middle + 1;
  }
  return lo;
}

// At most six digits, as many as are needed.
const number = (value) => String(Number(value.toPrecision(6)));

class Timeline {
  constructor(schedule, view, parent) {
    Object.assign(this, schedule.boxes);
    this.schedule = schedule;
    this.view = view;
    this.count = this.kind.length;
    for (const name of ["stage", "chunk", "unit", "start", "length", "line", "version", "overlap", "mark"]) {
      this[name] ??= new Uint8Array(this.count);
    }
    this.start = Float64Array.from(this.start);
    this.end = this.start.map((start, box) => start + this.length[box]);
    this.ranks = schedule.ops.length;
    this.readRows();
    this.readFlights();
    this.from = this.count ? this.start.reduce((a, b) => Math.min(a, b)) : 0;
    this.to = this.count ? this.end.reduce((a, b) => Math.max(a, b)) : 1;
    this.peaks = schedule.memory.map(([, amounts]) => amounts.reduce((a, b) => Math.max(a, b), 0));
    this.mostMemory = Math.max(...this.peaks);
    this.build(parent);
  }

  // Where the boxes of each rank start and stop among all boxes, and the rank of each box.
  readRows() {
    const { ops, copies } = this.schedule;
    this.rank = new Uint32Array(this.count);
    this.firstCopy = this.count;
    let next = 0;
    const rows = (sizes) => sizes.map((size, rank) => {
      this.rank.fill(rank, next, next + size);
      return { first: next, stop: next += size };
    });
    this.ops = rows(ops);
    this.firstCopy = next;
    this.copies = rows(copies);
  }

  // When each microbatch is in flight: from the start of its first op to the end of its last.
  readFlights() {
    const { pipelines, slices } = this.schedule;
    const ofStage = pipelines.flatMap(([, start, stop], index) => Array(stop - start).fill(index));
    const found = new Map();
    this.flight = new Array(this.count);
    for (let box = 0; box < this.count; box++) {
      if (this.look(box).step) continue;
      const microbatch = Math.floor(this.unit[box] / slices), pipeline = ofStage[this.stage[box]];
      const key = pipeline + ":" + microbatch;
      if (!found.has(key)) {
        const name = (pipelines.length > 1 ? pipelines[pipeline][0] + " " : "") + microbatch;
        found.set(key, { name, start: Infinity, end: -Infinity });
      }
      const flight = this.flight[box] = found.get(key);
      flight.start = Math.min(flight.start, this.start[box]);
      flight.end = Math.max(flight.end, this.end[box]);
    }
    this.flights = [...found.values()].sort((a, b) => a.start - b.start || a.end - b.end);
  }

  build(parent) {
    const section = parent.appendChild(document.createElement("section"));
    const heading = section.appendChild(document.createElement("h2"));
    heading.textContent = this.schedule.title;
    heading.appendChild(document.createElement("small")).textContent = this.schedule.figures;
    this.scroll = section.appendChild(document.createElement("div"));
    this.scroll.className = "scroll";
    this.canvas = this.scroll.appendChild(document.createElement("canvas"));
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${this.schedule.title}: ${this.schedule.figures}`);
    this.spacer = this.scroll.appendChild(document.createElement("div"));
    this.paint = this.canvas.getContext("2d");
  }

  look(box) { return this.schedule.kinds[this.kind[box]]; }
  fill(box) { return this.look(box).step ? this.colours.ink : this.look(box).fills[this.chunk[box]]; }
  // The name of an action, as in every other view (schedlang/schedule/naming.py).
  word(box) {
    const { stages, microbatches, slices } = this.schedule, unit = this.unit[box];
    const op = stages[this.stage[box]] + this.look(box).letters;
    if (unit < 0) return op;
    if (this.look(box).step || slices === 1) return op + unit;
    return `${op}(${microbatches[unit]})`;
  }
  label(box) { return this.look(box).step ? "U" : this.schedule.labels[this.unit[box]]; }

  // Geometry: all in pixels of the page.
  measure() {
    const lanes = this.copies.length ? 9 : 0, memory = this.view.memory;
    this.width = this.scroll.clientWidth;
    this.height = this.scroll.clientHeight;
    const room = (this.height - AXIS - 4) / this.ranks;
    this.pitch = Math.floor(Math.min(Math.max(room, LEAST_PITCH + lanes), memory ? MOST_PITCH : 44 + lanes));
    this.barHeight = memory ? Math.floor((this.pitch - lanes) * 0.55) : this.pitch - lanes - 4;
    this.memoryTop = this.barHeight + lanes + 2;
    this.memoryHeight = this.pitch - this.memoryTop - 5;
    this.spacer.style.height = `${Math.max(AXIS + this.ranks * this.pitch - this.height, 0)}px`;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.height = `${this.height}px`;
    this.paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.scale = (this.width - LEFT - RIGHT) / (this.view.to - this.view.from);
  }
  x(time) { return LEFT + (time - this.view.from) * this.scale; }
  time(x) { return this.view.from + (x - LEFT) / this.scale; }
  y(rank) { return AXIS + rank * this.pitch - this.scroll.scrollTop; }
  middle(box) { return this.y(this.rank[box]) + (box < this.firstCopy ? this.barHeight / 2 : this.barHeight + 5); }

  draw() {
    this.measure();
    const style = getComputedStyle(document.documentElement);
    const names = ["paper", "row", "ink", "muted", "line", "needs", "needed", "chosen", "held", "moved", "only"];
    this.colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.chosen = this.flights[this.view.chosen - 1] ?? null;
    this.seen = 0;
    const { paint } = this;
    paint.fillStyle = this.colours.paper;
    paint.fillRect(0, 0, this.width, this.height);
    const first = Math.floor(this.scroll.scrollTop / this.pitch);
    const stop = Math.min(Math.ceil((this.scroll.scrollTop + this.height) / this.pitch), this.ranks);
    for (let rank = first; rank < stop; rank++) this.drawFrame(rank);
    paint.save();
    paint.beginPath();
    paint.rect(LEFT, 0, this.width - LEFT - RIGHT, this.height);
    paint.clip();
    for (let rank = first; rank < stop; rank++) this.drawRank(rank);
    if (this.view.arrows) this.drawTransfers(first, stop);
    if (this.hovered !== undefined) this.drawHovered();
    paint.restore();
    this.drawAxis();
  }

  // What stands beside a rank: its number, its idle time, the most it holds.
  drawFrame(rank) {
    const { paint, colours } = this, y = this.y(rank);
    paint.fillStyle = colours.row;
    paint.fillRect(LEFT, y, this.width - LEFT - RIGHT, this.barHeight);
    paint.strokeStyle = colours.line;
    paint.lineWidth = 1;
    paint.strokeRect(LEFT + 0.5, y + 0.5, this.width - LEFT - RIGHT - 1, this.barHeight - 1);
    paint.font = "12px system-ui, 'Liberation Sans', 'DejaVu Sans', sans-serif";
    paint.textBaseline = "middle";
    paint.textAlign = "right";
    paint.fillStyle = colours.ink;
    paint.fillText(`rank ${rank}`, LEFT - 8, y + this.barHeight / 2);
    paint.textAlign = "left";
    paint.fillStyle = colours.muted;
    paint.fillText(this.schedule.idle[rank], this.width - RIGHT + 8, y + this.barHeight / 2);
    if (this.view.memory && this.memoryHeight > 9) {
      paint.fillText(`peak ${number(this.peaks[rank])}`, this.width - RIGHT + 8, y + this.memoryTop + this.memoryHeight / 2);
    }
  }

  drawRank(rank) {
    const y = this.y(rank);
    if (this.chosen) this.drawFlight(rank, y);
    this.drawBoxes(this.ops[rank], y, this.barHeight);
    if (this.copies.length) this.drawBoxes(this.copies[rank], y + this.barHeight + 2, 7);
    if (this.view.memory) this.drawMemory(this.schedule.memory[rank], y + this.memoryTop);
  }

  // The part of a row that is seen.
  visible(row) {
    const first = firstWhere(row.first, row.stop, (box) => this.end[box] >= this.view.from);
    return { first, stop: firstWhere(first, row.stop, (box) => this.start[box] > this.view.to) };
  }

  drawBoxes(row, y, height) {
    const { first, stop } = this.visible(row);
    this.seen += stop - first;
    if (stop - first > (this.width - LEFT - RIGHT) / 3) this.drawMixed(first, stop, y, height);
    else {
      for (let box = first; box < stop; box++) if (this.length[box]) this.drawBox(box, y, height);
      // Marks without a length come last, so that no neighbour covers them.
      for (let box = first; box < stop; box++) if (!this.length[box]) this.drawBox(box, y, height);
    }
    this.drawOverlaps(first, stop, y, height);
    if (this.view.marks) this.drawMarks(first, stop, y);
  }

  isDim(box) { return this.chosen !== null && this.flight[box] !== this.chosen; }

  drawBox(box, y, height) {
    const { paint } = this, x = this.x(this.start[box]), width = this.length[box] * this.scale;
    paint.globalAlpha = this.isDim(box) ? 0.15 : 1;
    paint.fillStyle = this.look(box).hatched && width > 4 ? this.hatch(this.fill(box)) : this.fill(box);
    if (this.length[box] === 0) paint.fillRect(x - MARK / 2, y, MARK, height);
    else paint.fillRect(x, y, width > 3 ? width - 1 : width, height);
    const isOp = box < this.firstCopy && this.length[box] > 0;
    if (isOp && this.schedule.versions.length && !this.look(box).step && width > 2) {
      paint.fillStyle = this.schedule.versions[this.version[box] % this.schedule.versions.length];
      paint.fillRect(x, y + height - STRIP, width - 1, STRIP);
    }
    const label = this.label(box);
    if (isOp && width > label.length * 7 + 3) {
      paint.font = "12px system-ui, 'Liberation Sans', 'DejaVu Sans', sans-serif";
      paint.textAlign = "center";
      paint.fillStyle = this.look(box).step ? this.colours.paper : this.look(box).inks[this.chunk[box]];
      paint.fillText(label, x + (width - 1) / 2, y + height / 2 + 1);
    }
    paint.globalAlpha = 1;
  }

  // Boxes thinner than pixels: each pixel gets the mixture of what it covers.
  drawMixed(first, stop, y, height) {
    const columns = this.width - LEFT - RIGHT, sums = new Float32Array(columns * 4);
    for (let box = first; box < stop; box++) {
      const [red, green, blue] = this.rgb(this.fill(box)), weight = this.isDim(box) ? 0.15 : 1;
      const a = Math.max(this.x(this.start[box]) - LEFT, 0), b = Math.min(this.x(this.end[box]) - LEFT, columns);
      for (let column = Math.floor(a); column < b; column++) {
        const share = (Math.min(b, column + 1) - Math.max(a, column)) * weight, at = column * 4;
        sums[at] += red * share; sums[at + 1] += green * share; sums[at + 2] += blue * share; sums[at + 3] += share;
      }
    }
    const image = new ImageData(columns, 1);
    for (let at = 0; at < sums.length; at += 4) {
      const share = sums[at + 3] || 1;
      for (let part = 0; part < 3; part++) image.data[at + part] = sums[at + part] / share;
      image.data[at + 3] = 255 * Math.min(sums[at + 3], 1);
    }
    this.strip ??= document.createElement("canvas");
    this.strip.width = columns;
    this.strip.height = 1;
    this.strip.getContext("2d").putImageData(image, 0, 0);
    this.paint.drawImage(this.strip, LEFT, y, columns, height);
  }

  rgb(colour) {
    this.parsed ??= new Map();
    if (!this.parsed.has(colour)) {
      const value = parseInt(colour.slice(1), 16);
      this.parsed.set(colour, [value >> 16, (value >> 8) & 255, value & 255]);
    }
    return this.parsed.get(colour);
  }

  hatch(colour) {
    this.hatches ??= new Map();
    if (!this.hatches.has(colour)) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 6;
      const brush = tile.getContext("2d");
      brush.fillStyle = colour;
      brush.fillRect(0, 0, 6, 6);
      brush.strokeStyle = "#ffffff";
      for (const shift of [-6, 0, 6]) { brush.moveTo(shift, 6); brush.lineTo(shift + 6, 0); }
      brush.stroke();
      this.hatches.set(colour, this.paint.createPattern(tile, "repeat"));
    }
    return this.hatches.get(colour);
  }

  // A frame around ops that run as one.
  drawOverlaps(first, stop, y, height) {
    this.paint.strokeStyle = this.colours.ink;
    this.paint.lineWidth = 1.5;
    for (let box = first; box < stop; box++) {
      if (!this.overlap[box]) continue;
      const begin = box;
      while (box + 1 < stop && this.overlap[box + 1] === this.overlap[begin]) box++;
      const x = this.x(this.start[begin]), width = this.x(this.end[box]) - x;
      if (width > 8) this.paint.strokeRect(x, y + 0.75, width - 1, height - 1.5);
    }
  }
}
