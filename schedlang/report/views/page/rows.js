// The row of a rank. Where ops are wide enough they are blocks, with numbers; where they are narrower, each column has
// bands, as high as the shares of its time that ops of a colour and idle time have; and where rows are too low for
// bands, a column has the mixture of their colours: how dense the work is.

// The least width of blocks, on average, and the least height of bands.
const BLOCK = 3, BAND = 14;
// Sizes of the letters on boxes, and how wide one is; up to 12, or a share of the height of the row.
const LETTERS = [64, 52, 42, 34, 28, 23, 19, 15.5, 12, 10.5, 9, 8], LETTER = 0.6, TALL = 0.22;

Object.assign(Timeline.prototype, {
  drawRow(rank, y) {
    const { schedule, view } = this, seen = this.visible(schedule.ops[rank]);
    this.seen += seen.stop - seen.first;
    if (seen.stop - seen.first > (this.width - this.left - this.right) / BLOCK) this.drawBands(rank, seen, y);
    else {
      if (view.causes) this.drawIdle(rank, y);
      this.drawBoxes(seen, y, this.barHeight);
      this.drawOverlaps(seen, y);
    }
    if (view.marks && schedule.differs) this.drawMarks(seen, y);
  },

  drawIdle(rank, y) {
    const { pen, schedule, colours } = this;
    const { first, stop } = this.seenOf(schedule.idleRows[rank], schedule.idleStart, schedule.idleEnd);
    for (let part = first; part < stop; part++) {
      const { pattern, ink, ground, dense } = colours.causes[schedule.cause[part]];
      const start = part;
      // What goes on with the same cause is drawn at once, without seams.
      while (part + 1 < stop && this.goesOn(part)) part++;
      const x = Math.max(this.x(schedule.idleStart[start]), this.left);
      const end = Math.min(this.x(schedule.idleEnd[part]), this.width - this.right);
      pen.fillStyle = end - x > 4 && this.barHeight > 4 ? hatch(pen, pattern, ink, ground) : dense;
      pen.fillRect(x, y, Math.max(end - x, 0.5), this.barHeight);
    }
  },

  goesOn(part) {
    const { cause, idleStart, idleEnd } = this.schedule;
    return cause[part + 1] === cause[part] && idleStart[part + 1] - idleEnd[part] < 0.1 / this.scale;
  },

  drawBoxes({ first, stop }, y, height) {
    const { length } = this.schedule;
    for (let box = first; box < stop; box++) if (length[box]) this.drawBox(box, y, height);
    // Marks without a length come last, so that no neighbour covers them.
    for (let box = first; box < stop; box++) if (!length[box]) this.drawBox(box, y, height);
  },

  isDim(box) { return this.chosen !== null && this.schedule.flightOf[box] !== this.chosen.key; },
  fill(box) {
    if (this.showsErrors()) return ERRORS[this.errorOf(box)].fill;
    const look = this.schedule.look(box);
    return look.step ? this.colours.ink : look.fills[this.schedule.chunk(box)];
  },

  // A box in a row, or of a box that ops share the part of one of them.
  drawBox(box, top, rowHeight) {
    const { pen, schedule } = this, look = schedule.look(box), fill = this.fill(box);
    const start = schedule.boxStart[box], x = this.x(start), width = (schedule.boxEnd[box] - start) * this.scale;
    const height = rowHeight / schedule.parts[box], y = top + schedule.part[box] * height;
    pen.globalAlpha = this.isDim(box) ? 0.15 : 1;
    pen.fillStyle = look.hatched && width > 4 && !this.showsErrors() ? hatch(pen, RECOMPUTED, this.colours.paper, fill) : fill;
    if (width === 0) pen.fillRect(x - MARK / 2, y, MARK, height);
    else pen.fillRect(x, y, width > 3 ? width - 1 : width, height);
    const isOp = box < schedule.firstCopy && width > 0;
    if (isOp && schedule.versions.length && !look.step && width > 2 && height > 10) {
      pen.fillStyle = schedule.versions[schedule.version[box] % schedule.versions.length];
      pen.fillRect(x, y + height - STRIP, width - 1, STRIP);
    }
    if (isOp) this.drawLabel(box, x, width, y, height);
    pen.globalAlpha = 1;
  },

  // The longest label that has room; letters get smaller before they go.
  drawLabel(box, x, width, y, height) {
    const { pen, schedule } = this, look = schedule.look(box);
    const most = Math.min(Math.max(12, height * TALL), height);
    for (const label of schedule.boxLabels(box)) {
      const size = LETTERS.find((each) => label.length * each * LETTER + 2 <= width - 1 && each <= most);
      if (!size) continue;
      pen.font = `${size}px ${FONT}`;
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      const ink = look.step ? this.colours.paper : look.inks[schedule.chunk(box)];
      pen.fillStyle = this.showsErrors() ? ERRORS[this.errorOf(box)].ink : ink;
      pen.fillText(label, x + (width - 1) / 2, y + height / 2 + 1);
      return;
    }
  },

  // The colours of a rank, those of ops first, then those of the causes of idle time; and of each its share of every
  // column.
  shares(rank, { first, stop }, columns) {
    const { schedule, view } = this, chunks = Math.max(...schedule.chunks) + 1;
    const kinds = Object.keys(schedule.kinds), base = kinds.length * chunks, errors = base + 1 + looks.causes.length;
    const most = errors + ERRORS.length;
    if (this.sums?.length !== most * columns) this.sums = new Float32Array(most * columns);
    const { sums } = this, isUsed = new Uint8Array(most);
    sums.fill(0);
    const { from } = view, { scale } = this;
    const add = (row, start, end) => {
      isUsed[row] = 1;
      const a = Math.max((start - from) * scale, 0), b = Math.min((end - from) * scale, columns);
      let column = Math.floor(a);
      // Most are within one column.
      if (b <= column + 1) {
        if (a < b) sums[row * columns + column] += b - a;
        return;
      }
      for (; column < b; column++) sums[row * columns + column] += Math.min(b, column + 1) - Math.max(a, column);
    };
    const rowOf = kinds.reduce((rows, kind, index) => { rows[kind] = index * chunks; return rows; }, []);
    const { kind, stage, start, end, chunks: chunkOf } = schedule, showsErrors = this.showsErrors();
    for (let box = first; box < stop; box++) {
      const row = showsErrors ? errors + this.errorOf(box) : rowOf[kind[box]] + chunkOf[stage[box]];
      add(this.chosen && this.isDim(box) ? base : row, start[box], end[box]);
    }
    if (view.causes) {
      const idle = this.seenOf(schedule.idleRows[rank], schedule.idleStart, schedule.idleEnd);
      for (let part = idle.first; part < idle.stop; part++) {
        add(base + 1 + schedule.cause[part], schedule.idleStart[part], schedule.idleEnd[part]);
      }
    }
    const fills = kinds.flatMap((kind) => {
      const { step, fills } = schedule.kinds[kind];
      return Array.from({ length: chunks }, (_, chunk) => step ? this.colours.ink : fills[chunk] ?? fills.at(-1));
    });
    fills.push(mixed(this.colours.muted, 0.25, this.colours.row), ...this.colours.causes.map(({ dense }) => dense));
    fills.push(...ERRORS.map(({ fill }) => fill));
    return fills.flatMap((fill, row) =>
      isUsed[row] ? [{ fill: rgbOf(fill), shares: sums.subarray(row * columns, (row + 1) * columns) }] : []);
  },

  drawBands(rank, seen, y) {
    this.isDense = true;
    const columns = Math.floor(this.width - this.left - this.right), colours = this.shares(rank, seen, columns);
    const high = this.barHeight >= BAND ? Math.round(this.barHeight) : 1;
    const image = new ImageData(columns, high);
    const row = rgbOf(this.colours.row);
    if (high === 1) denseRow(image, colours, row);
    else for (let column = 0; column < columns; column++) bandColumn(image, column, colours, row);
    // What lies in between is only a way onto the page, or into the SVG.
    this.strip ??= document.createElement("canvas");
    // A canvas of the same size is not made anew.
    if (this.strip.width !== columns || this.strip.height !== high) Object.assign(this.strip, { width: columns, height: high });
    this.strip.getContext("2d").putImageData(image, 0, 0);
    this.pen.imageSmoothingEnabled = false;
    this.pen.drawImage(this.strip, this.left, y, columns, this.barHeight);
  },

  // A frame around the box that ops share.
  drawOverlaps({ first, stop }, y) {
    const { pen, schedule } = this, { part, parts, boxStart, boxEnd } = schedule;
    pen.strokeStyle = this.colours.ink;
    pen.lineWidth = 1.5;
    for (let box = first; box < stop; box++) {
      if (part[box] || parts[box] === 1) continue;
      const x = this.x(boxStart[box]), width = this.x(boxEnd[box]) - x;
      if (width > 8 && this.barHeight > 6) pen.strokeRect(x, y + 0.75, width - 1, this.barHeight - 1.5);
    }
  },
});

// The colours of a column on top of each other, each as high as its share.
function bandColumn(image, column, colours, row) {
  const { width, height, data } = image;
  let done = 0, sum = 0;
  for (const { fill: [red, green, blue], shares } of [...colours, { fill: row }]) {
    sum = shares ? sum + shares[column] : 1;
    const until = Math.min(Math.round(sum * height), height);
    for (; done < until; done++) {
      const at = (done * width + column) * 4;
      data[at] = red;
      data[at + 1] = green;
      data[at + 2] = blue;
      data[at + 3] = 255;
    }
  }
}
// Each value with those beside it: of ops that are about as wide as a column, columns alone would make stripes that are
// in no schedule.
function mixNeighbours(values) {
  let before = values[0];
  for (let column = 0; column < values.length - 1; column++) {
    const own = values[column];
    values[column] = (before + 2 * own + values[column + 1]) / 4;
    before = own;
  }
}
// The mixtures of the colours of all columns.
function denseRow(image, colours, row) {
  const { width, data } = image;
  const parts = [0, 1, 2].map((part) => new Float32Array(width).fill(row[part]));
  for (const { fill, shares } of colours) {
    parts.forEach((values, part) => {
      // So much of the row's own colour gives way.
      const change = fill[part] - row[part];
      for (let column = 0; column < width; column++) values[column] += shares[column] * change;
    });
  }
  parts.forEach(mixNeighbours);
  for (let column = 0; column < width; column++) {
    const at = column * 4;
    data[at] = parts[0][column];
    data[at + 1] = parts[1][column];
    data[at + 2] = parts[2][column];
    data[at + 3] = 255;
  }
}
