// Figures as text, colours of a scale, numbers out of their packing.
const Format = {
  // What one unit of a figure is called by its name: tutti_rank_compute_seconds → s.
  figure(name, rate, value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const per = rate ? "/s" : "";
    const base = name.replace(/_total$/, "");
    if (base.endsWith("_seconds")) return rate ? `${+(100 * value).toPrecision(3)} %` : Tutti.seconds(value);
    if (base.endsWith("_bytes")) return Tutti.bytes(value) + per;
    if (base.endsWith("_ratio")) return `${(100 * value).toFixed(1)} %`;
    if (base.endsWith("_celsius")) return `${value.toFixed(0)} °C`;
    if (base.endsWith("_watts")) return `${value.toFixed(0)} W`;
    if (base.endsWith("_hertz")) return `${(value / 1e9).toFixed(2)} GHz`;
    return `${+value.toPrecision(4)}${per}`;
  },
  name(figure) {
    return figure.replace(/^tutti_/, "").replace(/_total$/, " per second").replace(/_(seconds|bytes|ratio|celsius|watts|hertz)$/, "").replaceAll("_", " ");
  },
  percent: (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value && Math.abs(value) < 0.01 ? 2 : 1)} %`),
  count(value) {
    if (value === null || value === undefined) return "–";
    for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= limit) return `${+(value / limit).toPrecision(4)} ${unit}`;
    }
    return `${+value.toPrecision(4)}`;
  },
  number: (value, digits = 4) => (value === null || value === undefined ? "–" : value.toFixed(digits)),
  seconds: (value) => (value === null || value === undefined ? "–" : Tutti.seconds(value)),
  time(second) {
    if (!second) return "–";
    const at = new Date(1000 * second);
    const pad = (n) => String(n).padStart(2, "0");
    return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  },
  clock: (second) => Format.time(second).slice(11),

  // The upper halves of 32-bit numbers, in base64.
  unpack(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const halves = new Uint16Array(bytes.buffer);
    const bits = new Uint32Array(halves.length);
    for (let i = 0; i < halves.length; i++) bits[i] = halves[i] << 16;
    return new Float32Array(bits.buffer);
  },

  // Where most values lie, so that one that is far off does not flatten the rest.
  range(values) {
    const every = Math.max(1, Math.floor(values.length / 20000));
    const known = [];
    for (let i = 0; i < values.length; i += every) if (Number.isFinite(values[i])) known.push(values[i]);
    if (!known.length) return [0, 1];
    known.sort((a, b) => a - b);
    let [low, high] = [known[Math.floor(0.01 * (known.length - 1))], known[Math.ceil(0.995 * (known.length - 1))]];
    // around a usual value above 0 at least half of it either way: noise looks even, and what is far off stands out
    const middle = known[known.length >> 1];
    if (low > 0) [low, high] = [Math.min(low, middle / 1.5), Math.max(high, middle * 1.5)];
    if (high <= low) [low, high] = [Math.min(0, low), high > 0 ? high : 1];
    return [low, high];
  },

  // From a pale blue, which is not the ground that missing values show, to a warm end: readable in both themes, and without colour vision.
  ramp() {
    const stops = matchMedia("(prefers-color-scheme: dark)").matches
      ? [[46, 58, 84], [38, 96, 166], [71, 160, 186], [238, 196, 92], [255, 120, 96]]
      : [[222, 233, 246], [158, 198, 238], [74, 134, 217], [226, 128, 63], [168, 32, 60]];
    const table = new Uint8Array(256 * 3);
    for (let i = 0; i < 256; i++) {
      const at = (i / 255) * (stops.length - 1);
      const k = Math.min(stops.length - 2, Math.floor(at));
      for (let c = 0; c < 3; c++) table[3 * i + c] = Math.round(stops[k][c] + (at - k) * (stops[k + 1][c] - stops[k][c]));
    }
    return table;
  },
  shade: (value, [low, high]) => Math.max(0, Math.min(255, Math.round((255 * (value - low)) / (high - low)))),
};
