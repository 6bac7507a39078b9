// What lies over the boxes of a timeline, and what stands below them and at the top.

Object.assign(Timeline.prototype, {
  // From the first start to the last end of the chosen microbatch on a rank.
  drawFlight(rank, y) {
    let start = Infinity, end = -Infinity;
    const { first, stop } = this.ops[rank];
    for (let box = first; box < stop; box++) {
      if (this.flight[box] !== this.chosen) continue;
      start = Math.min(start, this.start[box]);
      end = Math.max(end, this.end[box]);
    }
    if (end < start) return;
    this.paint.fillStyle = this.colours.chosen;
    this.paint.fillRect(this.x(start), y, (end - start) * this.scale, this.pitch - 3);
  },

  // A strip along the top of what is not so in the other schedule.
  drawMarks(first, stop, y) {
    let done = -Infinity;
    for (let box = first; box < stop; box++) {
      if (this.mark[box] === SAME || this.isDim(box)) continue;
      // Of many boxes in one pixel, the first is seen.
      const from = Math.max(this.x(this.start[box]), done);
      const to = Math.max(this.x(this.end[box]) - (this.length[box] * this.scale > 3 ? 1 : 0), from + 1);
      if (this.x(this.end[box]) <= done) continue;
      this.paint.fillStyle = this.mark[box] === MOVED ? this.colours.moved : this.colours.only;
      this.paint.fillRect(from, y, to - from, STRIP);
      done = to;
    }
  },

  // What the other schedule has to say of a box.
  difference(box) {
    if (this.mark[box] === SAME) return [];
    if (this.mark[box] !== MOVED) return ["only in this schedule"];
    const { other } = this, isOp = box < this.firstCopy, word = this.word(box);
    const row = (isOp ? other.ops : other.copies)[this.rank[box]];
    let place = row.first;
    while (other.word(place) !== word) place++;
    return [`moved: in the other schedule ${place === row.first ? "first" : `behind ${other.word(place - 1)}`}`];
  },

  // What the rank holds over time, as steps; the highest of all ranks fills the height.
  drawMemory([times, amounts], y) {
    const { paint, view } = this, unit = this.memoryHeight / (this.mostMemory || 1), bottom = y + this.memoryHeight;
    const level = (step) => bottom - Math.max(amounts[step], 0) * unit;
    let step = Math.max(firstWhere(0, times.length, (each) => times[each] > view.from) - 1, 0);
    if (!times.length) return;
    paint.beginPath();
    paint.moveTo(this.x(times[step]), bottom);
    let column = NaN, top = bottom;
    for (; step < times.length && times[step] <= view.to; step++) {
      const x = this.x(times[step]);
      // Of many steps in one pixel, the highest is seen.
      if (Math.round(x) !== column) { paint.lineTo(x, top); column = Math.round(x); top = level(step); }
      else top = Math.min(top, level(step));
      paint.lineTo(x, top);
      top = level(step);
    }
    const end = this.x(step < times.length ? view.to : this.to);
    paint.lineTo(end, top);
    paint.lineTo(end, bottom);
    paint.fillStyle = this.colours.held;
    paint.globalAlpha = 0.45;
    paint.fill();
    paint.globalAlpha = 1;
  },

  held(rank, time) {
    const [times, amounts] = this.schedule.memory[rank];
    const step = firstWhere(0, times.length, (each) => times[each] > time) - 1;
    return step < 0 ? 0 : amounts[step];
  },

  drawAxis() {
    const { paint, colours, view } = this;
    paint.fillStyle = colours.paper;
    paint.fillRect(0, 0, this.width, AXIS - 2);
    const raw = (view.to - view.from) / Math.max((this.width - LEFT - RIGHT) / 90, 1);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
    paint.fillStyle = paint.strokeStyle = colours.muted;
    paint.lineWidth = 1;
    paint.font = "11px system-ui, 'Liberation Sans', 'DejaVu Sans', sans-serif";
    paint.textAlign = "center";
    paint.textBaseline = "middle";
    for (let tick = Math.ceil(view.from / step); tick * step <= view.to + step * 1e-9; tick++) {
      const x = Math.round(this.x(tick * step)) + 0.5;
      paint.fillText(number(tick * step), x, 8);
      paint.beginPath();
      paint.moveTo(x, 15);
      paint.lineTo(x, AXIS - 3);
      paint.stroke();
    }
    paint.textAlign = "right";
    paint.fillText("time", LEFT - 22, 8);
  },

  // For each box, the arrows from and to it.
  arrowsOf(box) {
    if (!this.arrowIndex) {
      this.arrowIndex = new Map();
      const [from, to] = this.schedule.arrows;
      from.forEach((source, arrow) => {
        for (const end of [source, to[arrow]]) {
          if (!this.arrowIndex.has(end)) this.arrowIndex.set(end, []);
          this.arrowIndex.get(end).push(arrow);
        }
      });
    }
    return this.arrowIndex.get(box) ?? [];
  },

  drawArrow(arrow, colour, width) {
    const { paint } = this, [from, to] = this.schedule.arrows;
    const x = this.x(this.end[from[arrow]]), y = this.middle(from[arrow]);
    const goal = this.x(this.start[to[arrow]]), floor = this.middle(to[arrow]);
    const bend = Math.max(Math.min((goal - x) / 2, 60), 10);
    // On its own rank it goes below the boxes between.
    const sag = y === floor ? this.barHeight : 0;
    paint.strokeStyle = paint.fillStyle = colour;
    paint.lineWidth = width;
    paint.beginPath();
    paint.moveTo(x, y);
    paint.bezierCurveTo(x + bend, y + sag, goal - bend, floor + sag, goal, floor);
    paint.stroke();
    paint.beginPath();
    paint.moveTo(goal, floor);
    paint.lineTo(goal - 6, floor - 3.5);
    paint.lineTo(goal - 6, floor + 3.5);
    paint.fill();
  },

  // The transfers between ranks that are seen, unless they are too many to be told apart.
  drawTransfers(first, stop) {
    if (this.seen > MOST_ARROWS) return;
    for (let rank = first; rank < stop; rank++) {
      const { first: begin, stop: end } = this.visible(this.ops[rank]);
      for (let box = begin; box < end; box++) {
        for (const arrow of this.arrowsOf(box)) {
          const [from, to] = this.schedule.arrows;
          if (to[arrow] !== box || this.rank[from[arrow]] === rank || this.isDim(box)) continue;
          this.drawArrow(arrow, this.colours.muted, 1);
        }
      }
    }
  },

  drawHovered() {
    const { paint, hovered } = this, [from] = this.schedule.arrows;
    for (const arrow of this.arrowsOf(hovered)) {
      this.drawArrow(arrow, from[arrow] === hovered ? this.colours.needed : this.colours.needs, 1.75);
    }
    const isOp = hovered < this.firstCopy, height = isOp ? this.barHeight : 7;
    paint.strokeStyle = this.colours.ink;
    paint.lineWidth = 2;
    const width = Math.max(this.length[hovered] * this.scale - 1, 2);
    paint.strokeRect(this.x(this.start[hovered]), this.middle(hovered) - height / 2, width, height);
  },

  // The box at a point of the canvas.
  at(x, y) {
    const rank = Math.floor((y - AXIS + this.scroll.scrollTop) / this.pitch);
    if (y < AXIS || rank < 0 || rank >= this.ranks || x < LEFT || x > this.width - RIGHT) return undefined;
    const below = y - this.y(rank);
    const row = below <= this.barHeight ? this.ops[rank] : below <= this.barHeight + 10 ? this.copies[rank] : undefined;
    if (!row) return undefined;
    const time = this.time(x), near = MARK / this.scale;
    const box = firstWhere(row.first, row.stop, (each) => this.end[each] >= time - near);
    for (let each = box; each < row.stop && this.start[each] <= time + near; each++) {
      if (this.length[each] === 0 || (this.start[each] <= time && time < this.end[each])) return each;
    }
    return undefined;
  },

  // What a box is, in lines of text; the last is the program's.
  describe(box) {
    const { pipelines, slices, stages, versions, lines, copies } = this.schedule;
    const pipeline = pipelines.find(([, start, stop]) => start <= this.stage[box] && this.stage[box] < stop);
    const [where, line] = lines[this.line[box]];
    const rank = this.rank[box], start = this.start[box], end = this.end[box];
    const parts = [`stage ${stages[this.stage[box]]}, chunk ${this.chunk[box]} of rank ${rank}`];
    if (pipelines.length > 1) parts.push(`pipeline ${pipeline[0]}`);
    if (!this.look(box).step) parts.push(`microbatch ${this.flight[box].name}`);
    if (slices > 1 && !this.look(box).step) parts.push(`slice ${this.unit[box] % slices}`);
    const facts = [`${number(start)} to ${number(end)}, takes ${number(end - start)}`];
    if (versions.length) facts.push(`weights version ${this.version[box]}`);
    facts.push(`memory ${number(this.held(rank, start))} held as it starts`);
    return [`${this.word(box)} ${this.look(box).name}`, parts.join(", "), facts.join("; "), ...this.difference(box), `${where}  ${line}`];
  },
});
