// A run beside its prediction: which ops took longer than predicted, what that adds up to, and what explains it.

// Measured over predicted times: what is below a limit has the colour, and the legend says what that is.
const ERRORS = [
  { below: 2 / 3, fill: "#2166ac", ink: "#ffffff", name: "under 2/3 of the predicted time" },
  { below: 0.9, fill: "#92c5de", ink: "#10151c", name: "over 10% shorter than predicted" },
  { below: 1.1, fill: "#bfdcc0", ink: "#10151c", name: "within 10% of the predicted time" },
  { below: 1.5, fill: "#f4a582", ink: "#10151c", name: "over 10% longer than predicted" },
  { below: Infinity, fill: "#b2182b", ink: "#ffffff", name: "over 1.5 times the predicted time" },
];
// The share of the predicted makespan from which on a difference is worth a sentence.
const NOTED = 0.02;
const signed = (share) => `${share < 0 ? "−" : "+"}${percent(Math.abs(share))}`;

Object.assign(Schedule.prototype, {
  // The same op in the other schedule of a page, or NONE.
  twin(box) {
    const { other } = this.pair;
    if (!other || box === undefined) return NONE;
    const key = (schedule, each) => `${schedule.rank[each]} ${schedule.word(each)}`;
    if (!this.twins) {
      this.twins = new Map();
      for (let each = 0; each < other.schedule.count; each++) this.twins.set(key(other.schedule, each), each);
    }
    return this.twins.get(key(this, box)) ?? NONE;
  },
  // How long an op took, over how long it was predicted to; undefined where there is nothing to compare.
  ratio(box) {
    const twin = this.twin(box), { other } = this.pair;
    if (twin === NONE || !other.schedule.length[twin]) return undefined;
    const ratio = this.length[box] / other.schedule.length[twin];
    return this.role === "measured" ? ratio : 1 / ratio;
  },
  // What the other schedule says of the times of an op.
  timeDifference(box) {
    const twin = this.twin(box);
    if (!this.role || twin === NONE) return [];
    const { pair: { other: { schedule: other } } } = this, ratio = this.ratio(box);
    const times = `${other.role} ${this.moment(other.boxStart[twin])} to ${this.moment(other.boxEnd[twin])}`;
    const error = ratio === undefined ? "" : `; the run took ${signed(ratio - 1)}`;
    return [`${times}, takes ${this.time(other.length[twin])}${error}`];
  },

  // For each rank how long its ops take, and how long they wait for messages after what made these had ended.
  work() {
    return this.ops.map(({ first, stop }) => {
      let worked = 0, waited = 0, free = 0;
      for (let box = first; box < stop; box++) {
        let ready = free;
        for (const maker of this.makersOf(box)) ready = Math.max(ready, this.boxEnd[maker]);
        worked += this.length[box];
        waited += Math.max(this.start[box] - ready, 0);
        free = this.end[box];
      }
      return { worked, waited };
    });
  },
  // How long the ops of each kind take together.
  workByKind() {
    const sums = new Map();
    for (let box = 0; box < this.firstCopy; box++) {
      const { name } = this.look(box);
      sums.set(name, (sums.get(name) ?? 0) + this.length[box]);
    }
    return sums;
  },
});

Object.assign(Timeline.prototype, {
  showsErrors() { return this.schedule.role === "measured" && this.view.errors; },
  errorOf(box) {
    const ratio = this.schedule.ratio(box) ?? 1;
    return ERRORS.findIndex(({ below }) => ratio < below);
  },

  // Below the title of a run: what explains the difference, and tables of it.
  addErrors() {
    const { schedule } = this, predicted = this.other.schedule;
    const made = predicted.work(), took = schedule.work();
    const list = this.head.appendChild(document.createElement("ul"));
    list.className = "notes";
    const reasons = [...whyLonger(schedule, predicted, made, took), ...schedule.notes];
    list.append(...reasons.map((text) => element("li", text)));
    const row = (name, before, after) => [
      name, schedule.time(before), schedule.time(after), before ? signed(after / before - 1) : "",
    ];
    const kinds = schedule.workByKind();
    const table = [
      ["ops", "predicted", "measured", "error", "late messages"],
      ...[...predicted.workByKind()].map(([name, sum]) => row(`${name}, all ranks`, sum, kinds.get(name) ?? 0)),
      ...made.map(({ worked, waited }, rank) => [
        ...row(`rank ${rank}`, worked, took[rank].worked), schedule.time(Math.max(took[rank].waited - waited, 0)),
      ]),
      row("makespan", predicted.to - predicted.from, schedule.to - schedule.from),
    ];
    this.head.append(detailsOf("error by kind and rank", `error by kind and rank of ${schedule.title}`, table));
  },
});

// Which rank worked longer than predicted, and which waited longer for messages.
function whyLonger(schedule, predicted, made, took) {
  const least = NOTED * (predicted.to - predicted.from), texts = [];
  const worst = (what) => made
    .map((before, rank) => ({ rank, before: before[what], more: took[rank][what] - before[what] }))
    .reduce((a, b) => b.more > a.more ? b : a);
  const slow = worst("worked"), late = worst("waited");
  if (slow.more > least) {
    const error = signed(slow.more / slow.before);
    texts.push(`rank ${slow.rank} works ${schedule.time(slow.more)} longer than predicted (${error})`);
  }
  if (late.more > least) {
    const time = schedule.time(late.more);
    texts.push(`messages to rank ${late.rank} come ${time} later than predicted, added up`);
  }
  return texts.length ? texts : ["no rank works longer than predicted, and no messages come later"];
}
