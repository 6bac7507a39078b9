// A pen that writes an SVG where that of a canvas would draw: what timeline.js and its parts use of a canvas's context,
// and no more.

class SvgPen {
  constructor(width, height) {
    Object.assign(this, { width, height, fillStyle: "#000", strokeStyle: "#000", lineWidth: 1, font: "", globalAlpha: 1 });
    Object.assign(this, { textAlign: "left", textBaseline: "middle", imageSmoothingEnabled: true });
    this.parts = [];
    this.defs = [];
    this.known = new Map();
    this.path = "";
    this.open = [0];
  }

  put(tag, attributes, text) {
    const all = Object.entries(attributes).map(([name, value]) => ` ${name}="${escaped(value)}"`).join("");
    this.parts.push(text === undefined ? `<${tag}${all}/>` : `<${tag}${all}>${escaped(text)}</${tag}>`);
  }
  get alpha() { return this.globalAlpha < 1 ? { opacity: this.globalAlpha } : {}; }
  get filled() { return { fill: this.fillStyle, ...this.alpha }; }
  get stroked() { return { fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth, ...this.alpha }; }
  box(x, y, width, height) { return { x: short(x), y: short(y), width: short(width), height: short(height) }; }

  fillRect(...box) { this.put("rect", { ...this.box(...box), ...this.filled }); }
  strokeRect(...box) { this.put("rect", { ...this.box(...box), ...this.stroked }); }
  fillText(text, x, y) {
    const size = parseFloat(this.font.match(/[\d.]+(?=px)/)), anchor = { left: "start", center: "middle", right: "end" }[this.textAlign];
    // The middle of letters, which not every program that shows an SVG knows.
    const place = { x: short(x), y: short(y + size * 0.35), "font-size": size, "text-anchor": anchor };
    const weight = this.font.startsWith("600") ? { "font-weight": 600 } : {};
    this.put("text", { ...place, ...weight, ...this.filled }, text);
  }

  beginPath() { this.path = ""; }
  moveTo(x, y) { this.path += `M${short(x)} ${short(y)}`; }
  lineTo(x, y) { this.path += `L${short(x)} ${short(y)}`; }
  bezierCurveTo(...points) { this.path += `C${points.map(short).join(" ")}`; }
  rect(x, y, width, height) { this.path += `M${short(x)} ${short(y)}h${short(width)}v${short(height)}h${short(-width)}z`; }
  fill() { this.put("path", { d: this.path, ...this.filled }); }
  stroke() { this.put("path", { d: this.path, ...this.stroked }); }

  save() { this.open.push(0); }
  clip() {
    this.defs.push(`<clipPath id="clip${this.defs.length}"><path d="${this.path}"/></clipPath>`);
    this.group({ "clip-path": `url(#clip${this.defs.length - 1})` });
  }
  translate(x, y) { this.group({ transform: `translate(${short(x)} ${short(y)})` }); }
  group(attributes) {
    const [[name, value]] = Object.entries(attributes);
    this.parts.push(`<g ${name}="${value}">`);
    this.open[this.open.length - 1]++;
  }
  restore() { this.parts.push("</g>".repeat(this.open.pop())); }

  drawImage(canvas, ...box) {
    const style = "image-rendering:pixelated";
    this.put("image", { ...this.box(...box), preserveAspectRatio: "none", style, href: canvas.toDataURL() });
  }
  pattern(pattern, ink, ground) {
    if (pattern === "plain") return ground;
    const key = `${pattern} ${ink} ${ground}`;
    if (!this.known.has(key)) {
      const id = `pattern${this.known.size}`, size = looks.tile;
      const [path, width, cap] = looks.patterns[pattern];
      const line = `stroke="${ink}" stroke-width="${width}" stroke-linecap="${cap}"`;
      this.defs.push(
        `<pattern id="${id}" width="${size}" height="${size}" patternUnits="userSpaceOnUse">` +
        `<rect width="${size}" height="${size}" fill="${ground}"/><path d="${path}" fill="none" ${line}/></pattern>`,
      );
      this.known.set(key, `url(#${id})`);
    }
    return this.known.get(key);
  }

  text() {
    const size = `width="${this.width}" height="${this.height}" viewBox="0 0 ${this.width} ${this.height}"`;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="${escaped(FONT)}">\n<defs>${this.defs.join("")}</defs>\n` +
      `${this.parts.join("\n")}\n</svg>\n`;
  }
}

const short = (value) => Math.round(value * 100) / 100;
const escaped = (value) => String(value).replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);
