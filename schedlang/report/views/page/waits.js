// Why a rank is idle. The cause of every part of its idle time, and the op that is behind it, are the compiler's
// (schedlang/report/bubbles); the links between them are found here, by going from op to op that waits.

// More links than that nobody reads.
const MOST_LINKS = 6;

Object.assign(Schedule.prototype, {
  // The chain of waits at a time: each link is the box that a rank waits to run, and the box that it waits for, which
  // may be NONE. The last link's is what runs at that time, or has run.
  chain(rank, time) {
    const links = [];
    const ranks = new Set();
    while (!ranks.has(rank)) {
      ranks.add(rank);
      const row = this.ops[rank];
      const next = firstWhere(row.first, row.stop, (box) => this.start[box] > time);
      const waits = next < row.stop ? next - this.part[next] : NONE;
      const maker = waits === NONE ? this.last : this.waitedFor[waits];
      links.push({ rank, waits, maker });
      if (maker === NONE || maker >= this.firstCopy || this.boxEnd[maker] <= time) break;
      if (this.boxAt(this.ops[this.rank[maker]], time) !== undefined) break;
      rank = this.rank[maker];
    }
    return links;
  },

  // A part of a rank's idle time, in lines of text.
  describeIdle(part, time) {
    const rank = firstWhere(0, this.ranks, (each) => this.idleRows[each].stop > part);
    const [cause, meaning] = looks.causes[this.cause[part]];
    const start = this.idleStart[part], end = this.idleEnd[part];
    return [
      `idle: ${cause}${this.subject(part)}`,
      meaning,
      `rank ${rank}, ${this.moment(start)} to ${this.moment(end)}, takes ${this.time(end - start)}`,
      ...this.chainText(rank, time),
    ];
  },
  // The stage or the ranks that a cause is about.
  subject(part) {
    const about = this.about[part], other = this.other[part];
    if (about === NONE) return "";
    if (other === NONE) return `, stage ${this.stages[about]}`;
    return about === other ? `, rank ${about}` : `, rank ${about} to rank ${other}`;
  },
  chainText(rank, time) {
    const links = this.chain(rank, time), lines = [];
    for (const { rank, waits, maker } of links.slice(0, MOST_LINKS)) {
      const goal = waits === NONE ? "the end of all" : this.word(waits);
      const what = maker === NONE ? "" : `, which needs ${this.word(maker)} of rank ${this.rank[maker]}`;
      lines.push(`rank ${rank} waits for ${goal}${waits === NONE ? `: ${this.word(maker)} of rank ${this.rank[maker]}` : what}`);
    }
    if (links.length > MOST_LINKS) lines.push(`… and ${links.length - MOST_LINKS} more`);
    lines.push(...this.chainEnd(links.at(-1), time));
    return lines;
  },
  // What the last link of a chain waits for.
  chainEnd({ maker }, time) {
    if (maker === NONE) return [];
    if (maker >= this.firstCopy) return [`${this.word(maker)} copies from ${this.time(this.start[maker])} to ${this.time(this.end[maker])}`];
    const end = this.boxEnd[maker];
    if (end <= time) return [`${this.word(maker)} ended at ${this.time(end)}: its result is on its way, or held back`];
    const running = this.boxAt(this.ops[this.rank[maker]], time);
    const runs = `rank ${this.rank[maker]} runs ${this.word(running)} until ${this.time(this.end[running])}`;
    return [running === maker ? runs : `${runs}, before ${this.word(maker)}`];
  },
});
