"use strict";
// What all parts of a page share: data, colours, text, the tooltip. Parts register under a name
// (`Tutti.parts.gantt = (element, data) => redraw`) and are drawn by start.js.
const Tutti = {
  parts: {},
  arrays: {},

  // Decode the block of arrays: base64, deflate, then views by the directory.
  async load(directory, text) {
    const packed = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
    const bytes = await new Response(stream).arrayBuffer();
    const kinds = { Uint8: Uint8Array, Uint16: Uint16Array, Uint32: Uint32Array, Float32: Float32Array };
    for (const [name, [kind, offset, count]] of Object.entries(directory)) {
      Tutti.arrays[name] = new kinds[kind](bytes, offset, count);
    }
  },

  // A CSS variable as [red, green, blue].
  color(name) {
    const text = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
    const hex = /^#([0-9a-f]{6})$/i.exec(text);
    if (!hex) throw new Error("colour --" + name + " is '" + text + "'");
    const value = parseInt(hex[1], 16);
    return [value >> 16, (value >> 8) & 255, value & 255];
  },

  css(rgb, alpha = 1) {
    return `rgb(${rgb[0]} ${rgb[1]} ${rgb[2]} / ${alpha})`;
  },

  // Black or white, whichever reads better on a colour.
  ink(rgb) {
    return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140 ? "#10151d" : "#ffffff";
  },

  seconds(value) {
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    for (const [limit, factor, unit] of [[1e-6, 1e9, "ns"], [1e-3, 1e6, "µs"], [1, 1e3, "ms"]]) {
      if (size < limit) return `${+(value * factor).toPrecision(4)} ${unit}`;
    }
    return `${+value.toPrecision(4)} s`;
  },

  bytes(value) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let at = 0;
    for (; Math.abs(value) >= 1024 && at < units.length - 1; at++) value /= 1024;
    return `${value.toFixed(at ? 1 : 0)} ${units[at]}`;
  },

  // Round steps (1, 2, 5 × 10^n) that give about `count` marks from `low` to `high`.
  marks(low, high, count) {
    const rough = (high - low) / Math.max(1, count) || 1;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((m) => m * power >= rough * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step); k * step <= high * (1 + 1e-12); k++) found.push(k * step);
    return found;
  },

  // A moment on an axis: one unit for the whole step, digits enough to tell marks apart.
  moment(value, span, step) {
    const [factor, unit] = step >= 1 ? [1, "s"] : step >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    const digits = Math.max(0, Math.ceil(1 - Math.log10((span * factor) / 8)));
    return `${+(value * factor).toFixed(Math.min(9, digits))} ${unit}`;
  },

  // Size a canvas for the screen's pixels; returns pixels per CSS pixel.
  fit(canvas, width, height) {
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    canvas.width = Math.max(1, Math.round(width * ratio));
    canvas.height = Math.max(1, Math.round(height * ratio));
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
    return ratio;
  },

  tip(event, title, lines) {
    const tip = document.getElementById("tip");
    if (!title) {
      tip.hidden = true;
      return;
    }
    const strong = document.createElement("strong");
    strong.textContent = title;
    const rest = lines.map((line) => {
      const div = document.createElement("div");
      div.textContent = line;
      return div;
    });
    tip.replaceChildren(strong, ...rest);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const x = Math.min(event.clientX + 14, window.innerWidth - box.width - 8);
    const below = event.clientY + 18 + box.height < window.innerHeight;
    tip.style.left = Math.max(8, x) + "px";
    tip.style.top = (below ? event.clientY + 18 : event.clientY - box.height - 10) + "px";
  },

  legend(list, entries) {
    list.replaceChildren(
      ...entries.map(({ name, color, dash, press }) => {
        const item = document.createElement("li");
        const key = document.createElement("i");
        if (dash) key.className = "dash";
        else key.style.background = color;
        if (!press) {
          item.append(key, name);
          return item;
        }
        const button = document.createElement("button");
        button.type = "button";
        button.setAttribute("aria-pressed", "true");
        button.append(key, name);
        button.addEventListener("click", () => {
          const on = button.getAttribute("aria-pressed") !== "true";
          button.setAttribute("aria-pressed", String(on));
          press(on);
        });
        item.append(button);
        return item;
      }),
    );
  },
};
