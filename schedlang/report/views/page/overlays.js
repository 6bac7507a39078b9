// What lies over the rows, and the axis of time above them.

const MOST_ARROWS = 4000;

Object.assign(Timeline.prototype, {
  // From the first start to the last end of the chosen microbatch on a rank.
  drawFlight(rank, y) {
    const { schedule } = this, { first, stop } = schedule.ops[rank];
    let start = Infinity, end = -Infinity;
    for (let box = first; box < stop; box++) {
      if (schedule.flightOf[box] !== this.chosen.key) continue;
      start = Math.min(start, schedule.boxStart[box]);
      end = Math.max(end, schedule.boxEnd[box]);
    }
    if (end < start) return;
    this.pen.fillStyle = this.colours.chosen;
    this.pen.fillRect(this.x(start), y, (end - start) * this.scale, this.pitch - 3);
  },

  // A strip along the top of what is not so in the other schedule.
  drawMarks({ first, stop }, y) {
    const { pen, schedule, colours } = this;
    // Up to where there are marks, for each part of boxes that ops share.
    const done = [];
    for (let box = first; box < stop; box++) {
      if (schedule.mark[box] === SAME || this.isDim(box)) continue;
      const part = schedule.part[box], before = done[part] ?? -Infinity, end = this.x(schedule.boxEnd[box]);
      // Of many boxes in one pixel, the first is seen.
      if (end <= before) continue;
      const from = Math.max(this.x(schedule.boxStart[box]), before);
      const to = Math.max(end - (schedule.length[box] * this.scale > 3 ? 1 : 0), from + 1);
      pen.fillStyle = schedule.mark[box] === MOVED ? colours.moved : colours.only;
      const height = this.heightOf(box);
      pen.fillRect(from, y + part * height, to - from, Math.min(STRIP, height / 2));
      done[part] = to;
    }
  },

  // The critical path: along the ops, and from where one ends to where the next one starts.
  drawPath() {
    const { pen, schedule: { path, rank }, colours } = this;
    const low = Math.min(this.barHeight / 2, 4);
    const height = (box) => this.y(rank[box]) + this.barHeight - low;
    const { first, stop } = this.seenOf({ first: 0, stop: path.box.length }, path.start, path.end);
    pen.beginPath();
    for (let part = first; part < stop; part++) {
      const y = height(path.box[part]), runs = path.part[part] <= 1;
      if (runs || part === first) pen[part === first ? "moveTo" : "lineTo"](this.x(path.start[part]), y);
      pen.lineTo(this.x(path.end[part]), y);
    }
    // On light and on dark boxes alike: a line with an edge of the other lightness.
    const width = Math.min(Math.max(this.pitch / 6, 1.5), 3);
    for (const [colour, wide] of [[colours.paper, width + 2], [colours.path, width]]) {
      pen.strokeStyle = colour;
      pen.lineWidth = wide;
      pen.stroke();
    }
  },

  drawAxis() {
    const { pen, colours, view, schedule } = this;
    pen.fillStyle = colours.paper;
    pen.fillRect(0, 0, this.width, this.axis - 2);
    const [size, name] = schedule.seconds ? unitFor(view.to * schedule.seconds, TIMES) : [1, ""];
    const unit = schedule.seconds ? size / schedule.seconds : 1;
    const raw = (view.to - view.from) / unit / Math.max((this.width - this.left - this.right) / (90 * this.big), 1);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
    pen.fillStyle = pen.strokeStyle = colours.muted;
    pen.lineWidth = 1;
    const middle = this.axis * 0.36, low = this.axis * 0.68;
    pen.font = this.font(11);
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    const origin = view.from / unit, end = view.to / unit;
    for (let tick = Math.ceil(origin / step - 1e-9); tick * step <= end + step * 1e-9; tick++) {
      const x = Math.round(this.x(tick * step * unit)) + 0.5;
      pen.fillText(number(tick * step, 9), x, middle);
      pen.beginPath();
      pen.moveTo(x, low);
      pen.lineTo(x, this.axis - 3);
      pen.stroke();
    }
    pen.textAlign = "right";
    if (!this.isNarrow) pen.fillText(name || "time", this.left - 14, middle);
    if (!schedule.unitText) return;
    const wide = 6 * this.big * schedule.unitText.length + 6;
    pen.fillStyle = colours.paper;
    pen.fillRect(this.width - wide, 0, wide, low);
    pen.fillStyle = colours.muted;
    pen.fillText(schedule.unitText, this.width - 4, middle);
  },

  drawArrow(from, to, colour, width) {
    const { pen, schedule } = this;
    const x = this.x(schedule.boxEnd[from]), y = this.middle(from);
    const goal = this.x(schedule.boxStart[to]), floor = this.middle(to);
    const bend = Math.max(Math.min((goal - x) / 2, 60), 10);
    // On its own rank it goes below the boxes between.
    const sag = y === floor ? this.barHeight : 0;
    pen.strokeStyle = pen.fillStyle = colour;
    pen.lineWidth = width;
    pen.beginPath();
    pen.moveTo(x, y);
    pen.bezierCurveTo(x + bend, y + sag, goal - bend, floor + sag, goal, floor);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(goal, floor);
    pen.lineTo(goal - 6, floor - 3.5);
    pen.lineTo(goal - 6, floor + 3.5);
    pen.fill();
  },

  // The transfers between ranks that are seen, unless they are too many to be told apart.
  drawTransfers(first, stop) {
    const { schedule } = this;
    if (this.seen > MOST_ARROWS) return;
    for (let rank = first; rank < stop; rank++) {
      const { first: begin, stop: end } = this.visible(schedule.ops[rank]);
      for (let box = begin; box < end; box++) {
        for (const maker of schedule.makersOf(box)) {
          if (schedule.rank[maker] !== rank && !this.isDim(box)) this.drawArrow(maker, box, this.colours.muted, 1);
        }
      }
    }
  },

  // What changes with the pointer, on a canvas of its own.
  drawOver() {
    this.pen = layer(this.over, this.width, this.height);
    const { pointed, linked, schedule } = this;
    if (linked) this.clipped(() => this.drawLinked(linked));
    if (!pointed) return;
    this.clipped(() => {
      if (pointed.box !== undefined) this.drawPointed(pointed.box);
      else if (pointed.idle !== undefined) this.drawChain(pointed);
      if (this.hasMemory) this.drawMemoryPoint(pointed.rank, pointed.time);
      this.drawTime(pointed.time);
    });
  },
  drawTime(time) {
    this.pen.fillStyle = this.colours.muted;
    const bottom = Math.min(this.y(this.schedule.ranks), this.height);
    this.pen.fillRect(this.x(time) - 0.5, this.axis - 3, 1, bottom - this.axis);
  },
  // What is pointed at in another schedule: the same op here, and the same time.
  drawLinked({ time, box }) {
    this.drawTime(time);
    if (box !== NONE) this.outlineBox(box);
  },

  drawPointed(box) {
    const { schedule, colours } = this;
    for (const maker of schedule.makersOf(box)) this.drawArrow(maker, box, colours.needs, 1.75);
    for (const user of schedule.usersOf(box)) this.drawArrow(box, user, colours.needed, 1.75);
    this.outlineBox(box);
  },

  // A part of idle time, and what waits for what there.
  drawChain({ rank, time, idle }) {
    const { schedule, colours } = this;
    this.outline(schedule.idleStart[idle], schedule.idleEnd[idle], this.y(rank), this.barHeight);
    for (const { waits, maker } of schedule.chain(rank, time)) {
      if (maker === NONE) continue;
      if (waits !== NONE) this.drawArrow(maker, waits, colours.needs, 1.75);
      this.outlineBox(maker);
    }
  },

  outlineBox(box) {
    const { schedule } = this, height = this.heightOf(box);
    this.outline(schedule.boxStart[box], schedule.boxEnd[box], this.middle(box) - height / 2, height);
  },
  outline(start, end, y, height) {
    this.pen.strokeStyle = this.colours.ink;
    this.pen.lineWidth = 2;
    this.pen.strokeRect(this.x(start), y, Math.max((end - start) * this.scale - 1, 2), height);
  },
});
