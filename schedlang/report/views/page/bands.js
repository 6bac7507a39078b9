// Rows of ops that are too narrow for blocks: each column has bands, as high as the shares of its time that ops of a
// colour and idle time have; where rows are too low for bands, a column has the mixture of their colours: how dense the
// work is. What each colour takes of a rank's time up to the edge of every bin is summed up once. A share is then the
// difference of two sums, so zooming and moving cost the same for a million ops as for a thousand.

// The bins for an op, on average; and the least height of bands.
const BINS = 2, BAND = 14;

Object.assign(Timeline.prototype, {
  // The sums of a rank, by the numbers of its colours.
  sums(rank) {
    const key = [this.view.causes, this.view.chosen, this.showsErrors(), DARK.matches].join();
    if (this.sumsKey !== key) Object.assign(this, { sumsKey: key, sumsOf: [] });
    return this.sumsOf[rank] ??= this.sumUp(rank);
  },
  sumUp(rank) {
    const { schedule, view } = this, { kind, stage, chunks, start, end, from, to } = schedule;
    const { first, stop } = schedule.ops[rank], bins = BINS * (stop - first), scale = bins / (to - from);
    const colours = this.bandColours(), showsErrors = this.showsErrors(), sums = [];
    const add = (colour, start, end) => {
      const sum = sums[colour] ??= new Float32Array(bins + 2), a = (start - from) * scale, b = (end - from) * scale;
      for (let bin = Math.floor(a); bin < b; bin++) sum[bin + 1] += Math.min(b, bin + 1) - Math.max(a, bin);
    };
    for (let box = first; box < stop; box++) {
      if (this.isDim(box)) add(colours.dim, start[box], end[box]);
      else if (showsErrors) add(colours.errors + this.errorOf(box), start[box], end[box]);
      else add(colours.kinds[kind[box]] + chunks[stage[box]], start[box], end[box]);
    }
    if (view.causes) {
      const { cause, idleStart, idleEnd } = schedule, idle = schedule.idleRows[rank];
      for (let part = idle.first; part < idle.stop; part++) add(colours.causes + cause[part], idleStart[part], idleEnd[part]);
    }
    sums.forEach((sum) => { for (let bin = 1; bin < sum.length; bin++) sum[bin] += sum[bin - 1]; });
    return { sums, bins, scale };
  },

  // The numbers of colours: each kind has one for every chunk, from its own on; then come dim ops, causes and errors.
  bandColours() {
    const chunks = Math.max(...this.schedule.chunks) + 1, kinds = [];
    Object.keys(this.schedule.kinds).forEach((kind, index) => { kinds[kind] = index * chunks; });
    const dim = Object.keys(this.schedule.kinds).length * chunks;
    return { chunks, kinds, dim, causes: dim + 1, errors: dim + 1 + looks.causes.length };
  },
  bandFills() {
    const { ink, muted, row, causes } = this.colours, { chunks } = this.bandColours();
    const kinds = Object.values(this.schedule.kinds).flatMap(({ step, fills }) =>
      Array.from({ length: chunks }, (_, chunk) => step ? ink : fills[chunk] ?? fills.at(-1)));
    const others = [mixed(muted, 0.25, row), ...causes.map(({ dense }) => dense), ...ERRORS.map(({ fill }) => fill)];
    return [...kinds, ...others].map(rgbOf);
  },

  // The same of the mixture of all colours: how far its red, green and blue are from those of the row.
  mixture(rank) {
    const all = this.sums(rank), { fills } = this, row = rgbOf(this.colours.row);
    return all.mixture ??= row.map((value, part) => {
      const mixture = new Float64Array(all.bins + 2);
      all.sums.forEach((sum, colour) => {
        const change = fills[colour][part] - value;
        for (let bin = 0; bin < sum.length; bin++) mixture[bin] += sum[bin] * change;
      });
      return mixture;
    });
  },

  // The bins of a rank: the place among them where the view begins, and how many a column has.
  window(rank, columns) {
    const { bins, scale } = this.sums(rank), { from, to } = this.view;
    return { bins, origin: (from - this.schedule.from) * scale, step: (to - from) * scale / columns };
  },
  // The colours that are seen of a rank, and of each its share of every column.
  shares(rank, columns) {
    const bins = this.window(rank, columns), { fills } = this;
    if (this.room?.length !== fills.length * columns) this.room = new Float32Array(fills.length * columns);
    return this.sums(rank).sums.flatMap((sum, colour) => {
      const shares = this.room.subarray(colour * columns, (colour + 1) * columns);
      return takenIn(sum, bins, shares) ? [{ fill: fills[colour], shares }] : [];
    });
  },

  drawBands(rank, y) {
    this.isDense = true;
    const columns = Math.floor(this.width - this.left - this.right), row = rgbOf(this.colours.row);
    const high = this.barHeight >= BAND ? Math.round(this.barHeight) : 1;
    const pixels = this.pixelsOf(columns, high);
    if (high === 1) mixColumns(pixels, this.mixture(rank), this.window(rank, columns), row);
    else stackColumns(pixels, columns, high, [...this.shares(rank, columns), { fill: row }]);
    this.drawPixels(y);
  },
});

// How much is taken in each column, by its sums up to the edge of every bin; false if it is nothing.
function takenIn(sum, { bins, origin, step }, found) {
  const upTo = (place) => {
    const inside = Math.min(Math.max(place, 0), bins), bin = Math.floor(inside);
    return sum[bin] + (inside - bin) * (sum[bin + 1] - sum[bin]);
  };
  let before = upTo(origin);
  if (upTo(origin + step * found.length) === before) return false;
  for (let column = 0; column < found.length; column++) {
    const next = upTo(origin + step * (column + 1));
    found[column] = (next - before) / step;
    before = next;
  }
  return true;
}

// A pixel of an image as one number; bytes of numbers are stored from the lowest on.
const pixelOf = (red, green, blue) => (0xff << 24 | blue << 16 | green << 8 | red) >>> 0;

// The colours of each column on top of each other, each as high as its share; the last has what is left.
function stackColumns(pixels, columns, high, colours) {
  const values = colours.map(({ fill }) => pixelOf(...fill));
  for (let column = 0; column < columns; column++) {
    let at = column, sum = 0;
    colours.forEach(({ shares }, index) => {
      sum = shares ? sum + shares[column] : 1;
      const end = column + Math.min(Math.round(sum * high), high) * columns;
      for (; at < end; at += columns) pixels[at] = values[index];
    });
  }
}

// The mixture of the colours of each column.
function mixColumns(pixels, mixture, bins, row) {
  const [red, green, blue] = mixture.map((sum, part) => {
    const changes = new Float32Array(pixels.length);
    takenIn(sum, bins, changes);
    return withNeighbours(changes, row[part]);
  });
  for (let column = 0; column < pixels.length; column++) pixels[column] = pixelOf(red[column], green[column], blue[column]);
}
// A value and its changes, each mixed with those beside it: of ops that are about as wide as a column, columns alone
// would make stripes that are in no schedule.
function withNeighbours(changes, value) {
  const mixed = new Uint8ClampedArray(changes.length), last = changes.length - 1;
  for (let column = 0; column <= last; column++) {
    const before = changes[Math.max(column - 1, 0)], next = changes[Math.min(column + 1, last)];
    mixed[column] = value + (before + 2 * changes[column] + next) / 4;
  }
  return mixed;
}
