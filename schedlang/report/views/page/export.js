// What is seen, as an SVG or a PNG, or on paper: titles, rows, axes and the legend, and nothing around them.

const TITLE = 26, LINE = 20, SHARPNESS = 2;
// A sheet of paper, across, without its margins.
const PAPER = { width: 1040, height: 690 };

function exported(pen) {
  const width = Math.max(...timelines.map((each) => each.width));
  let top = 0;
  const paper = timelines[0].colours.paper, ink = timelines[0].colours.ink;
  pen.fillStyle = paper;
  pen.fillRect(0, 0, pen.width ?? pen.canvas.width, pen.height ?? pen.canvas.height);
  for (const timeline of timelines) {
    pen.fillStyle = ink;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    const title = `${timeline.schedule.title}: ${timeline.schedule.figures}`;
    pen.font = `600 ${sizeOf(title, width)}px ${FONT}`;
    pen.fillText(title, 8, top + TITLE / 2 + 2);
    pen.fillStyle = timeline.colours.needs;
    pen.font = `12px ${FONT}`;
    timeline.schedule.wrong.forEach((text, line) => pen.fillText(text, 8, top + TITLE + LINE * line + LINE / 2));
    pen.save();
    pen.translate(0, top + headOf(timeline));
    timeline.drawOn(pen);
    pen.restore();
    top += headOf(timeline) + timeline.height;
  }
  exportLegend(pen, top + 6, width);
}

// The size of the letters of a title that is to be seen as a whole: letters of 1 are at most so wide on average.
function sizeOf(title, width) {
  return Math.max(Math.min(13, Math.floor((width - 16) / (0.67 * title.length) * 2) / 2), 8);
}
// The height of a title, and of the claims below it that do not hold.
function headOf(timeline) {
  return TITLE + LINE * timeline.schedule.wrong.length;
}

// The entries of the legend, in lines as wide as the picture.
function exportLegend(pen, top, width) {
  let x = 8, y = top;
  for (const { name, swatches } of legendEntries()) {
    const wide = swatches.length * 17 + name.length * 6.6 + 18;
    if (x > 8 && x + wide > width) { x = 8; y += LINE; }
    for (const { pattern, ink, ground } of swatches) {
      pen.fillStyle = hatch(pen, pattern, ink, ground);
      pen.fillRect(x, y, 14, 12);
      x += 17;
    }
    pen.fillStyle = timelines[0].colours.muted;
    pen.font = `12px ${FONT}`;
    pen.textAlign = "left";
    pen.fillText(name, x + 2, y + 6.5);
    x += wide - swatches.length * 17;
  }
  return y + LINE;
}

function exportSize() {
  // Below the last row there is nothing.
  for (const timeline of timelines) timeline.height = timeline.contentHeight;
  const width = Math.max(...timelines.map((each) => each.width));
  const height = timelines.reduce((sum, each) => sum + headOf(each) + each.height, 0);
  // How many lines the legend has is known when it is written.
  return { width, height: Math.ceil(height + exportLegend(new SvgPen(width, 0), 6, width)) };
}
function svgOfView() {
  const { width, height } = exportSize(), pen = new SvgPen(width, height);
  exported(pen);
  redraw();
  return pen.text();
}
function pngOfView() {
  const { width, height } = exportSize();
  const canvas = Object.assign(document.createElement("canvas"), { width: width * SHARPNESS, height: height * SHARPNESS });
  const pen = canvas.getContext("2d");
  pen.scale(SHARPNESS, SHARPNESS);
  exported(pen);
  redraw();
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

// The part of time that is seen, with all ranks, as large as a sheet of paper.
function layOutForPaper() {
  if (!timelines.length) return;
  const legend = exportLegend(new SvgPen(PAPER.width, 0), 6, PAPER.width);
  for (const timeline of timelines) {
    timeline.isOnPaper = true;
    timeline.colours = theme();
    timeline.place(PAPER.width, (PAPER.height - legend) / timelines.length - headOf(timeline));
  }
  byId("print").innerHTML = svgOfView();
  for (const timeline of timelines) timeline.isOnPaper = false;
}
const onPaper = matchMedia("print");
onPaper.addEventListener("change", () => { if (onPaper.matches) layOutForPaper(); });
addEventListener("beforeprint", layOutForPaper);

async function save(ending) {
  const blob = ending === "png" ? await pngOfView() : new Blob([svgOfView()], { type: "image/svg+xml" });
  const address = URL.createObjectURL(blob);
  const name = timelines.map((each) => each.schedule.title.split(" ")[0]).join("-");
  Object.assign(document.createElement("a"), { href: address, download: `${name}.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
