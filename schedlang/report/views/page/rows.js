// The row of a rank. Where ops are wide enough they are blocks, with numbers; bands.js draws those that are narrower.

// The least width of blocks, on average, and that from which on there are few enough to draw them one by one.
const BLOCK = 3, WIDE = 16;
// Sizes of the letters on boxes, and how wide one is; up to 12, or a share of the height of the row. Narrower boxes have
// none.
const LETTERS = [64, 52, 42, 34, 28, 23, 19, 15.5, 12, 10.5, 9, 8], LETTER = 0.6, TALL = 0.22;
const NARROWEST = LETTERS.at(-1) * LETTER + 3;
// The opacity of ops of other microbatches than the chosen one.
const DIM = 0.15;

Object.assign(Timeline.prototype, {
  drawRow(rank, y) {
    const { pen, schedule, view } = this, seen = this.visible(schedule.ops[rank]);
    this.seen += seen.stop - seen.first;
    this.letters = 0;
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    if (seen.stop - seen.first > (this.width - this.left - this.right) / BLOCK) this.drawBands(rank, y);
    else {
      if (view.causes) this.drawIdle(rank, y);
      if (this.isFine(seen)) this.drawFineBoxes(seen, y);
      else this.drawBoxes(seen, y, this.barHeight);
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

  // Many blocks are runs of pixels of an image, which is drawn at once; an SVG has no pixels.
  isFine({ first, stop }) {
    const { pen, schedule, width, left, right } = this;
    return !pen.pattern && !schedule.versions.length && (stop - first) * WIDE > width - left - right;
  },
  drawFineBoxes({ first, stop }, y) {
    const { schedule, left, right, width, barHeight } = this, ratio = window.devicePixelRatio || 1;
    const { boxStart, boxEnd, part, parts } = schedule, high = schedule.mostParts;
    const columns = Math.floor((width - left - right) * ratio), pixels = this.pixelsOf(columns, high), others = [];
    pixels.fill(0);
    for (let box = first; box < stop; box++) {
      const wide = (boxEnd[box] - boxStart[box]) * this.scale;
      // Those with a pattern, and marks, which may lie on others.
      if (!wide || this.hasPattern(box, wide)) {
        others.push(box);
        continue;
      }
      const begin = Math.max(Math.round((this.x(boxStart[box]) - left) * ratio), 0);
      const end = Math.round((this.x(boxEnd[box]) - left - (wide > 3 ? 1 : 0)) * ratio), pixel = this.pixel(box);
      for (let row = high * part[box] / parts[box]; row < high * (part[box] + 1) / parts[box]; row++) {
        pixels.fill(pixel, row * columns + begin, row * columns + Math.min(Math.max(end, begin + 1), columns));
      }
    }
    this.drawPixels(y);
    for (const box of others) this.drawBox(box, y, barHeight);
    for (let box = first; box < stop; box++) {
      const wide = (boxEnd[box] - boxStart[box]) * this.scale, height = barHeight / parts[box];
      if (wide >= NARROWEST && !this.hasPattern(box, wide)) this.drawLabel(box, this.x(boxStart[box]), wide, y + part[box] * height, height);
    }
  },
  pixel(box) { return (pixelOf(...rgbOf(this.fill(box))) & 0xffffff | (this.isDim(box) ? DIM * 255 : 255) << 24) >>> 0; },

  // An image over the rows of a rank, whose pixels are numbers. It is only a way onto the page, or into an SVG.
  pixelsOf(columns, high) {
    if (this.image?.width !== columns || this.image.height !== high) {
      this.image = new ImageData(columns, high);
      this.strip = Object.assign(document.createElement("canvas"), { width: columns, height: high });
    }
    return new Uint32Array(this.image.data.buffer);
  },
  drawPixels(y) {
    this.strip.getContext("2d").putImageData(this.image, 0, 0);
    this.pen.imageSmoothingEnabled = false;
    this.pen.drawImage(this.strip, this.left, y, this.width - this.left - this.right, this.barHeight);
  },

  // Whether a box has the pattern of its kind, for which it needs room.
  hasPattern(box, width) { return width >= looks.tile && this.hatched[this.schedule.kind[box]]; },
  // The kinds that have their pattern: those of which some box has no room for its letter.
  hatchedKinds() {
    const { kinds, shortest, labels } = this.schedule, most = Math.max(...labels.map((label) => label.length));
    return Object.fromEntries(Object.entries(kinds).map(([kind, { letters, pattern, hatched }]) => {
      const room = (shortest[kind] ?? 0) * this.scale - 3, isNarrow = (letters.length + most) * LETTERS.at(-1) * LETTER > room;
      return [kind, pattern !== "plain" && !this.showsErrors() && (hatched || isNarrow)];
    }));
  },

  // A box in a row, or of a box that ops share the part of one of them.
  drawBox(box, top, rowHeight) {
    const { pen, schedule } = this, look = schedule.look(box), fill = this.fill(box);
    const start = schedule.boxStart[box], x = this.x(start), width = (schedule.boxEnd[box] - start) * this.scale;
    const height = rowHeight / schedule.parts[box], y = top + schedule.part[box] * height;
    pen.globalAlpha = this.isDim(box) ? DIM : 1;
    pen.fillStyle = this.hasPattern(box, width) ? hatch(pen, look.pattern, look.lines[schedule.chunk(box)], fill) : fill;
    if (width === 0) pen.fillRect(x - MARK / 2, y, MARK, height);
    else pen.fillRect(x, y, width > 3 ? width - 1 : width, height);
    const isOp = box < schedule.firstCopy && width > 0;
    if (isOp && schedule.versions.length && !look.step && width > 2 && height > 10) {
      pen.fillStyle = schedule.versions[schedule.version[box] % schedule.versions.length];
      pen.fillRect(x, y + height - STRIP, width - 1, STRIP);
    }
    if (isOp && width >= NARROWEST) this.drawLabel(box, x, width, y, height);
    pen.globalAlpha = 1;
  },

  // The longest label that has room; letters get smaller before they go.
  drawLabel(box, x, width, y, height) {
    const { pen, schedule } = this, look = schedule.look(box);
    // Letters are as large on a part of a box as on a whole one.
    const most = Math.min(Math.max(12, height * schedule.parts[box] * TALL), height);
    for (const label of schedule.boxLabels(box)) {
      const room = Math.min((width - 3) / (label.length * LETTER), most), size = LETTERS.find((each) => each <= room);
      if (!size) continue;
      // To set a font takes longer than to write a label.
      if (size !== this.letters) pen.font = `${size}px ${FONT}`;
      this.letters = size;
      const ink = look.step ? this.colours.paper : look.inks[schedule.chunk(box)];
      pen.fillStyle = this.showsErrors() ? ERRORS[this.errorOf(box)].ink : ink;
      pen.fillText(label, x + (width - 1) / 2, y + height / 2 + 1);
      return;
    }
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

