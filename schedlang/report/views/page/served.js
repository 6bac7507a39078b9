// A page that `schedc view --serve` has: the program's parameters as sliders, and the schedule anew when one is moved,
// or when the program is saved.

const served = JSON.parse(byId("served").textContent);

// The parameters that were moved: the defaults of the others may depend on these.
const moved = new Set();
const parameters = () => new URLSearchParams([...moved].map((name) => [name, byId(`parameter-${name}`).value]));

function sayWrong(text) {
  const below = timelines.length ? "\nThe picture is of the last program that was proved." : "";
  byId("wrong").textContent = text ? text + below : "";
  byId("wrong").hidden = !text;
}

let questions = 0;
async function ask() {
  const number = ++questions;
  outdate("checking …");
  const { schedules, parameters: values, wrong } = await answerOf(`data?${parameters()}`);
  // An answer to an older question than the last one is nobody's.
  if (number !== questions) return;
  sayWrong(wrong);
  if (!schedules) return outdate("not of this program");
  // Other parameters need other sliders.
  if (Object.keys(values).join() !== served.parameters.map(({ name }) => name).join()) return location.reload();
  for (const [name, value] of Object.entries(values)) {
    if (moved.has(name)) continue;
    for (const input of byId(`parameter-${name}`).parentElement.querySelectorAll("input")) input.value = value;
  }
  await present(schedules);
}

async function answerOf(address) {
  try {
    return await (await fetch(address)).json();
  } catch {
    return { wrong: "error: nobody answers: `schedc view --serve` has ended" };
  }
}

function addSlider({ name, value, most }) {
  const group = byId("parameters").appendChild(element("span", `${name} `));
  group.className = "group";
  const slider = Object.assign(document.createElement("input"), { type: "range", min: 0, max: most, value });
  const exact = Object.assign(document.createElement("input"), { type: "number", min: 0, value, id: `parameter-${name}` });
  slider.setAttribute("aria-label", `${name}, roughly`);
  exact.setAttribute("aria-label", `${name}, exactly`);
  group.append(slider, exact);
  const set = (from, to) => {
    to.value = from.value;
    moved.add(name);
    ask();
  };
  slider.oninput = () => set(slider, exact);
  exact.oninput = () => set(exact, slider);
}

if (served) {
  sayWrong(served.wrong);
  served.parameters.forEach(addSlider);
  byId("parameters").hidden = !served.parameters.length;
  const saved = new EventSource("saved");
  saved.onmessage = ask;
  // Until it is there again, nobody says that the program was saved.
  saved.onerror = () => {
    outdate("not connected");
    saved.onopen = ask;
  };
}
