// A schedule that was executed, as data: its boxes are numbers, and what there is to say of them stands in columns,
// rank by rank in order of time, first all ops, then all copies to and from the host. Nothing here draws.

const SAME = 0, MOVED = 1, NONE = -1;

// The first of the numbers lo, lo + 1, ... below hi for which `holds` is true; it stays true from there on.
function firstWhere(lo, hi, holds) {
  while (lo < hi) {
    const middle = (lo + hi) >> 1;
    if (holds(middle)) hi = middle; else lo = middle + 1;
  }
  return lo;
}

function least(values) {
  let found = Infinity;
  for (const value of values) if (value < found) found = value;
  return found;
}
function most(values) {
  let found = 0;
  for (const value of values) if (value > found) found = value;
  return found;
}

class Schedule {
  constructor(data, columns) {
    const { ops, copies, kind, stage, unit, line, overlap, cause, behind, about, other } = columns;
    Object.assign(this, data, { kind, stage, unit, line, overlap, cause, behind, about, other });
    this.count = kind.length;
    this.ranks = ops.length;
    this.version = columns.version;
    this.mark = columns.mark.length ? columns.mark : new Uint8Array(this.count);
    this.differs = columns.mark.length > 0;
    this.start = fromTicks(columns.start, data.tick);
    this.length = fromTicks(columns.length, data.tick);
    this.end = new Float64Array(this.count);
    for (let box = 0; box < this.count; box++) this.end[box] = this.start[box] + this.length[box];
    // How long the shortest op of each kind takes, of those that take time.
    this.shortest = [];
    for (let box = 0; box < this.count; box++) {
      if (this.length[box]) this.shortest[kind[box]] = Math.min(this.shortest[kind[box]] ?? Infinity, this.length[box]);
    }
    this.delay = fromTicks(columns.delay, data.tick);
    this.readRows(ops, copies);
    this.readOverlaps();
    this.readNeeds(columns);
    this.readFlights();
    this.readIdle(columns);
    this.readPath(columns);
    this.readLanes(columns);
    this.readMemory(columns);
    this.from = this.count ? least(this.start) : 0;
    this.to = Math.max(this.from, most(this.end), most(this.idleEnd));
  }

  // Where the boxes of each rank begin and stop among all boxes, and the rank of each box.
  readRows(ops, copies) {
    this.ops = groups(ops);
    this.firstCopy = this.ops.at(-1)?.stop ?? 0;
    this.copies = groups(copies, this.firstCopy);
    this.rank = new Uint32Array(this.count);
    for (const rows of [this.ops, this.copies]) {
      rows.forEach(({ first, stop }, rank) => this.rank.fill(rank, first, stop));
    }
  }

  // Ops that overlap run as one, and share a box: boxStart and boxEnd are its times, and `part` is the place of an op
  // among its `parts`, from above. In `start` and `end` each has its share of that time, behind the one before.
  readOverlaps() {
    const { count, overlap, rank, start, end } = this;
    this.part = new Uint8Array(count);
    this.parts = new Uint8Array(count).fill(1);
    this.boxStart = start;
    this.boxEnd = end;
    this.mostParts = 1;
    if (!overlap.some(Boolean)) return;
    this.boxStart = start.slice();
    this.boxEnd = end.slice();
    for (let first = 0, stop; first < count; first = stop) {
      for (stop = first + 1; overlap[first] && overlap[stop] === overlap[first] && rank[stop] === rank[first];) stop++;
      this.parts.fill(stop - first, first, stop);
      this.mostParts = Math.max(this.mostParts, stop - first);
      this.boxStart.fill(start[first], first, stop);
      this.boxEnd.fill(end[stop - 1], first, stop);
      for (let box = first; box < stop; box++) this.part[box] = box - first;
    }
  }
  // Of the ops that share a box, the one at a share of its height.
  partAt(box, height) {
    return box - this.part[box] + Math.min(Math.floor(height * this.parts[box]), this.parts[box] - 1);
  }
  // The boxes that share a box with this one, and itself.
  together(box) {
    const first = box - this.part[box];
    return Array.from({ length: this.parts[box] }, (_, part) => first + part);
  }

  // Box b needs the boxes maker[needs[b].first] up to maker[needs[b].stop], and waited last for waitedFor[b].
  readNeeds({ needed, needBefore, makerBefore }) {
    const needFirst = this.needFirst = new Uint32Array(this.count + 1), maker = this.maker = needBefore;
    const waitedFor = this.waitedFor = makerBefore;
    let at = 0;
    for (let box = 0; box < this.count; box++) {
      const stop = needFirst[box + 1] = at + needed[box];
      for (; at < stop; at++) maker[at] = box - maker[at];
      waitedFor[box] = waitedFor[box] ? box - waitedFor[box] : NONE;
    }
  }

  // When each microbatch is in flight: from the start of its first op to the end of its last.
  readFlights() {
    const { pipelines, slices } = this;
    const pipelineOf = pipelines.flatMap(([, start, stop], index) => Array(stop - start).fill(index));
    const microbatches = Math.ceil(this.microbatches.length / slices);
    const { boxStart: start, boxEnd: end, stage, unit } = this, flights = [];
    this.flightOf = new Int32Array(this.count).fill(NONE);
    const isStep = [];
    for (const [kind, { step }] of Object.entries(this.kinds)) isStep[kind] = step;
    for (let box = 0; box < this.count; box++) {
      if (isStep[this.kind[box]]) continue;
      const pipeline = pipelineOf[stage[box]], microbatch = Math.floor(unit[box] / slices);
      const key = this.flightOf[box] = pipeline * microbatches + microbatch;
      const flight = flights[key] ??= { key, name: this.flightName(pipeline, microbatch), start: Infinity, end: -Infinity };
      if (start[box] < flight.start) flight.start = start[box];
      if (end[box] > flight.end) flight.end = end[box];
    }
    this.flightByKey = flights;
    this.flights = flights.filter(Boolean).sort((a, b) => a.start - b.start || a.end - b.end);
  }
  flight(box) { return this.flightByKey[this.flightOf[box]]; }
  flightName(pipeline, microbatch) {
    return this.pipelines.length > 1 ? `${this.pipelines[pipeline][0]} ${microbatch}` : String(microbatch);
  }

  readIdle({ idleOf, idleStart, idleEnd }) {
    this.idleRows = groups(idleOf);
    this.idleStart = fromTicks(idleStart, this.tick);
    this.idleEnd = fromTicks(idleEnd, this.tick);
  }

  readPath({ pathPart, pathBox, pathStart, pathEnd }) {
    this.path = {
      part: pathPart, box: pathBox, start: fromTicks(pathStart, this.tick), end: fromTicks(pathEnd, this.tick),
    };
    this.critical = new Uint8Array(this.count);
    pathBox.forEach((box, index) => { if (pathPart[index] <= 1) this.critical[box] = 1; });
  }

  // The components of ops: for each resource, and there for each rank, in order of time; each of the op in a box.
  readLanes({ laneOf, laneBox, laneStart, laneEnd }) {
    const rows = groups(laneOf);
    this.lanes = this.resources.map((_, lane) => rows.slice(lane * this.ranks, (lane + 1) * this.ranks));
    this.laneBox = laneBox;
    this.laneStart = fromTicks(laneStart, this.tick);
    this.laneEnd = fromTicks(laneEnd, this.tick);
  }
  // The component that a resource of a rank runs at a time.
  componentAt(lane, rank, time) {
    const { first, stop } = this.lanes[lane][rank];
    const part = firstWhere(first, stop, (each) => this.laneEnd[each] > time);
    return part < stop && this.laneStart[part] <= time ? part : undefined;
  }

  // What each rank holds, in steps: from time[i] on amount[i].
  readMemory({ memoryOf, memoryTime, memoryAmount }) {
    this.memoryRows = groups(memoryOf);
    this.memoryTime = fromTicks(memoryTime, this.tick);
    this.memoryAmount = fromTicks(memoryAmount, this.memoryTick);
    this.peaks = this.memoryRows.map(({ first, stop }) => {
      let most = 0;
      for (let step = first; step < stop; step++) most = Math.max(most, this.memoryAmount[step]);
      return most;
    });
    this.peak = Math.max(0, ...this.peaks);
  }
  held(rank, time) {
    const { first, stop } = this.memoryRows[rank];
    const step = firstWhere(first, stop, (each) => this.memoryTime[each] > time) - 1;
    return step < first ? 0 : this.memoryAmount[step];
  }

  // The boxes that need what a box makes.
  usersOf(box) {
    if (!this.users) {
      const { maker, needFirst } = this, next = new Uint32Array(this.count + 1);
      for (const each of maker) next[each + 1]++;
      for (let box = 0; box < this.count; box++) next[box + 1] += next[box];
      this.userFirst = next.slice();
      this.users = new Uint32Array(maker.length);
      for (let user = 0; user < this.count; user++) {
        for (let at = needFirst[user]; at < needFirst[user + 1]; at++) this.users[next[maker[at]]++] = user;
      }
    }
    return this.users.subarray(this.userFirst[box], this.userFirst[box + 1]);
  }
  makersOf(box) { return this.maker.subarray(this.needFirst[box], this.needFirst[box + 1]); }

  look(box) { return this.kinds[this.kind[box]]; }
  chunk(box) { return this.chunks[this.stage[box]]; }
  // The name of an action, as in every other view (schedlang/schedule/naming.py).
  word(box) {
    const unit = this.unit[box], op = this.stages[this.stage[box]] + this.look(box).letters;
    if (unit < 0) return op;
    if (this.look(box).step || this.slices === 1) return op + unit;
    return `${op}(${this.microbatches[unit]})`;
  }
  // What may stand on a box, from the longest text to the shortest, as in every other view; where a run is compared with
  // its prediction, also by how much it was off.
  boxLabels(box) {
    const { letters, step } = this.look(box), prefix = this.prefixes[this.stage[box]], unit = this.unit[box];
    const ratio = this.pair.showsErrors() ? this.ratio(box) : undefined;
    const isCounted = !step && unit >= 0, number = isCounted ? this.labels[unit] : unit < 0 ? "" : unit;
    const labels = [`${prefix}${letters}${number}`, isCounted ? letters + number : letters];
    if (isCounted) labels.push(number);
    return ratio === undefined ? labels : [`${labels[1]} ${signed(ratio - 1)}`, ...labels];
  }

  time(value, like) { return timeText(value, this.seconds, like); }
  // A time on the axis, which takes more digits than how long something takes.
  moment(value) { return timeText(value, this.seconds, value, 5); }
  amount(value) { return amountText(value, this.memoryUnit); }

  // The box of a row that runs at a time; marks without a length count while they are `near`.
  boxAt(row, time, near = 0) {
    const box = firstWhere(row.first, row.stop, (each) => this.end[each] >= time - near);
    for (let each = box; each < row.stop && this.start[each] <= time + near; each++) {
      if (this.length[each] === 0 || (this.start[each] <= time && time < this.end[each])) return each;
    }
    return undefined;
  }
  // The part of a rank's idle time that a time is in.
  idleAt(rank, time) {
    const { first, stop } = this.idleRows[rank];
    const part = firstWhere(first, stop, (each) => this.idleEnd[each] > time);
    return part < stop && this.idleStart[part] <= time ? part : undefined;
  }

  // What a box is, in lines of text; the last is the program's.
  describe(box) {
    const { pipelines, slices, stages, versions, lines } = this;
    const pipeline = pipelines.find(([, start, stop]) => start <= this.stage[box] && this.stage[box] < stop);
    const [where, line] = lines[this.line[box]];
    const rank = this.rank[box], start = this.boxStart[box], end = this.boxEnd[box];
    const parts = [`stage ${stages[this.stage[box]]}, chunk ${this.chunk(box)} of rank ${rank}`];
    if (pipelines.length > 1) parts.push(`pipeline ${pipeline[0]}`);
    if (!this.look(box).step) parts.push(`microbatch ${this.flight(box).name}`);
    if (slices > 1 && !this.look(box).step) parts.push(`slice ${this.unit[box] % slices}`);
    const facts = [`${this.moment(start)} to ${this.moment(end)}, takes ${this.time(end - start)}`];
    if (versions.length) facts.push(`weights version ${this.version[box]}`);
    facts.push(`memory ${this.amount(this.held(rank, start))} held as it starts`);
    const others = this.together(box).filter((each) => each !== box).map((each) => this.word(each));
    const lot = others.length ? [`runs as one with ${others.join(" and ")}`] : [];
    if (this.critical[box]) lot.push("on the critical path");
    return [
      `${this.word(box)} ${this.look(box).name}`, parts.join(", "), facts.join("; "), ...lot, ...this.difference(box),
      `${where}  ${line}`,
    ];
  }

  // The same of one of its components, on a resource.
  describeComponent(lane, part) {
    const [title, ...lines] = this.describe(this.laneBox[part]), start = this.laneStart[part], end = this.laneEnd[part];
    const times = `${this.time(start, end)} to ${this.time(end)}, takes ${this.time(end - start)}`;
    return [title, `on ${this.resources[lane]}: ${times}`, ...lines];
  }

  // What the other of two schedules has to say of a box.
  difference(box) {
    if (this.role) return this.timeDifference(box);
    if (this.mark[box] === SAME) return [];
    if (this.mark[box] !== MOVED) return ["only in this schedule"];
    const { other: { schedule: other } } = this.pair, isOp = box < this.firstCopy, word = this.word(box);
    const row = (isOp ? other.ops : other.copies)[this.rank[box]];
    let place = row.first;
    while (other.word(place) !== word) place++;
    return [`moved: in the other schedule ${place === row.first ? "first" : `behind ${other.word(place - 1)}`}`];
  }
}
