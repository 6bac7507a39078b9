// What is seen of the schedules, in the address of the page: so that a link shows others the same.

const SWITCHES = { memory: true, causes: true, path: false, arrows: false, marks: true, errors: true };
const view = { from: 0, to: 1, rows: 1, chosen: 0, stacked: false, ...SWITCHES };

function writeState() {
  // A page within another one, as in a notebook, has no address.
  if (location.protocol === "about:") return;
  const state = new URLSearchParams();
  if (view.from > all.from || view.to < all.to) {
    state.set("from", number(view.from, 9));
    state.set("to", number(view.to, 9));
  }
  if (view.rows > 1) state.set("rows", number(view.rows, 3));
  if (view.chosen) state.set("microbatch", view.chosen);
  if (view.stacked !== startsStacked()) state.set("stacked", Number(view.stacked));
  for (const [name, usual] of Object.entries(SWITCHES)) {
    if (view[name] !== usual) state.set(name, Number(view[name]));
  }
  const text = state.toString();
  if (location.hash.slice(1) !== text) history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
}
// More than two schedules stand below each other, as there is no room for them side by side.
const startsStacked = () => timelines.length > 2;

function readState() {
  const state = new URLSearchParams(location.hash.slice(1));
  const of = (name, usual) => {
    const value = Number(state.get(name) ?? NaN);
    return Number.isFinite(value) ? value : usual;
  };
  for (const [name, usual] of Object.entries(SWITCHES)) view[name] = Boolean(of(name, usual));
  view.rows = Math.min(Math.max(of("rows", 1), 1), MOST_ROWS);
  view.stacked = Boolean(of("stacked", startsStacked()));
  view.chosen = Math.min(Math.max(Math.round(of("microbatch", 0)), 0), mostFlights());
  setRange(of("from", all.from), of("to", all.to));
}
