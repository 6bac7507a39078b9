// How numbers, times and amounts of memory are written; units.py writes them alike.

const TIMES = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]];
const BYTES = [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]];

// At most six digits, as many as are needed; of measured times three, which is what they are known to.
const DIGITS = 3;
const number = (value, digits = 6) => String(Number(value.toPrecision(digits)));
const percent = (share) => `${Math.round(share * 100)}%`;

// The unit in which a number is at least 1, of those in a list from the largest to the smallest.
const unitFor = (value, units) => units.find(([size]) => Math.abs(value) >= size) ?? units.at(-1);

// A time; `seconds` is how many a unit of time has, or null. `like` is a time that has the unit that is wanted.
function timeText(value, seconds, like = value, digits = DIGITS) {
  if (!seconds) return number(value);
  const [size, name] = like ? unitFor(like * seconds, TIMES) : TIMES[0];
  return `${number(value * seconds / size, digits)} ${name}`;
}

// An amount of memory; `unit` is bytes, or what else is counted.
function amountText(value, unit) {
  if (unit !== "bytes") return number(value);
  const [size, name] = unitFor(value, BYTES);
  return `${number(value / size, 4)} ${name}`;
}
