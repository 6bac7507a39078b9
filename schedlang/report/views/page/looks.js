// Colours and patterns, for the light and the dark page. The patterns are paths on a tile, so that a canvas and an SVG
// draw them alike.

const looks = JSON.parse(document.getElementById("looks").textContent);
const FONT = "system-ui, 'Liberation Sans', 'DejaVu Sans', sans-serif";

const rgbOf = (() => {
  const known = new Map();
  return (colour) => {
    if (!known.has(colour)) {
      const value = parseInt(colour.slice(1), 16);
      known.set(colour, [value >> 16, (value >> 8) & 255, value & 255]);
    }
    return known.get(colour);
  };
})();
// So much of one colour in another.
function mixed(colour, share, other) {
  const a = rgbOf(colour), b = rgbOf(other);
  return "#" + a.map((part, at) => Math.round(part * share + b[at] * (1 - share)).toString(16).padStart(2, "0")).join("");
}

// The colours of the page as it is now; paper is white.
const DARK = matchMedia("screen and (prefers-color-scheme: dark)");
function theme() {
  const style = getComputedStyle(document.documentElement);
  const names = [
    "paper", "row", "ink", "muted", "line", "needs", "needed", "chosen", "held", "moved", "only", "path",
  ];
  const colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  const isDark = DARK.matches;
  colours.causes = looks.causes.map(([, , colour, pattern]) => {
    const ink = isDark ? mixed(colour, 0.5, "#ffffff") : colour;
    const tints = Object.entries(looks.shares).map(([name, share]) => [name, mixed(ink, share, colours.row)]);
    return { pattern, ...Object.fromEntries(tints) };
  });
  return colours;
}

// A tile of a pattern as a canvas.
function tile(pattern, ink, ground, size = looks.tile) {
  const ratio = window.devicePixelRatio || 1;
  const canvas = Object.assign(document.createElement("canvas"), { width: size * ratio, height: size * ratio });
  const pen = canvas.getContext("2d");
  pen.scale(ratio * size / looks.tile, ratio * size / looks.tile);
  pen.fillStyle = ground;
  pen.fillRect(0, 0, looks.tile, looks.tile);
  pen.strokeStyle = ink;
  const [path, width, cap] = looks.patterns[pattern];
  pen.lineWidth = width;
  pen.lineCap = cap;
  pen.stroke(new Path2D(path));
  return canvas;
}

// What fills a shape with a pattern, for a canvas's pen or that of an SVG.
const patterns = new Map();
function hatch(pen, pattern, ink, ground) {
  if (pen.pattern) return pen.pattern(pattern, ink, ground);
  if (pattern === "plain") return ground;
  const key = `${pattern} ${ink} ${ground}`;
  if (!patterns.has(key)) {
    const made = pen.createPattern(tile(pattern, ink, ground), "repeat");
    const ratio = window.devicePixelRatio || 1;
    made.setTransform(new DOMMatrix().scale(1 / ratio));
    patterns.set(key, made);
  }
  return patterns.get(key);
}
