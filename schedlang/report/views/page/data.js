// What packing.py has packed: columns of numbers, of which the text has the differences, byte by byte.

async function unpacked(schedule) {
  const letters = atob(schedule.packed), packed = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at++) packed[at] = letters.charCodeAt(at);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const columns = {};
  let at = 0;
  for (const [name, count] of schedule.columns) {
    columns[name] = wholeNumbers(bytes, at, count);
    at += 4 * count;
  }
  return columns;
}

// Of all differences the lowest bytes come first, and the highest ones last.
function wholeNumbers(bytes, at, count) {
  const column = new Int32Array(count);
  let value = 0;
  for (let row = 0; row < count; row++, at++) {
    const low = bytes[at] | (bytes[at + count] << 8);
    value += low | (bytes[at + 2 * count] << 16) | (bytes[at + 3 * count] << 24);
    column[row] = value;
  }
  return column;
}

// Times or amounts, from how many ticks they are.
function fromTicks(column, [numerator, denominator]) {
  const values = new Float64Array(column.length);
  for (let row = 0; row < column.length; row++) values[row] = column[row] * numerator / denominator;
  return values;
}

// Where the rows of each group begin and stop, from the numbers of them.
function groups(sizes, next = 0) {
  return Array.from(sizes, (size) => ({ first: next, stop: next += size }));
}
