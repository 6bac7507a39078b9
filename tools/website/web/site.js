// The front page and the gallery. Without this script, or from a folder, both show the same without moving.

// The playground in place of a still picture, once the page itself is there; a browser runs it from a server only.
for (const still of document.querySelectorAll(".live")) {
  if (!location.protocol.startsWith("http")) break;
  const frame = document.createElement("iframe");
  frame.title = "a schedule to change, and its picture";
  frame.src = `playground/index.html?embedded#program=${still.dataset.program}`;
  frame.onload = () => frame.classList.add("there");
  (window.requestIdleCallback ?? setTimeout)(() => still.append(frame));
}

// Of the gallery: the programs of a family; two to compare.
const gallery = document.querySelector(".gallery");
if (gallery) {
  const cards = [...gallery.querySelectorAll(".card")], link = gallery.querySelector(".compare");
  const show = (family) => {
    for (const card of cards) card.hidden = !(!family || card.dataset.family.split("|").includes(family));
  };
  const picked = () => [...gallery.querySelectorAll("input[name=compare]:checked")].map((each) => each.value);
  gallery.addEventListener("change", ({ target }) => {
    if (target.name === "family") return show(target.value);
    const names = picked();
    // A third one takes the place of the one that was picked first.
    if (names.length > 2) gallery.querySelector(`input[value="${names.find((each) => each !== target.value)}"]`).checked = false;
    const two = picked();
    link.href = `../playground/compare.html#${two.join(",")}`;
    link.textContent = two.length === 2 ? `Compare ${two.join(" and ")}` : "Compare two programs";
  });
  const family = new URLSearchParams(location.search).get("family");
  const radio = family && gallery.querySelector(`input[name=family][value="${CSS.escape(family)}"]`);
  if (radio) {
    radio.checked = true;
    show(family);
  }
}
