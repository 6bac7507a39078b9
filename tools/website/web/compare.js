// Two programs of the gallery on one axis, as `schedc view ONE OTHER` draws them. Their data were written as the site was
// built, with times in one share of the model.

const [one, other] = document.querySelectorAll("select");
const frame = document.getElementById("picture");
const picture = new Promise((resolve) => {
  if (frame.contentWindow.present) resolve(frame.contentWindow);
  else frame.onload = () => resolve(frame.contentWindow);
});
const dataOf = async (name) => (await fetch(`compared/${name}.json`)).json();

const gallery = await (await fetch("programs.json")).json();
for (const select of [one, other]) {
  select.append(...gallery.map(({ name, title }) => new Option(`${name}: ${title}`, name)));
  select.onchange = () => {
    history.replaceState(null, "", `#${one.value},${other.value}`);
    draw();
  };
}

let turn = 0;
async function draw() {
  const own = ++turn, page = await picture, data = await Promise.all([one, other].map((select) => dataOf(select.value)));
  if (own === turn) await page.present(data.flat());
}
function read() {
  const names = location.hash.slice(1).split(",").filter((name) => gallery.some((each) => each.name === name));
  [one.value, other.value] = [names[0] ?? "1f1b", names[1] ?? "zb_h1"];
  draw();
}
addEventListener("hashchange", read);
read();
