// The timeline. Rows (class × track) hold instructions sorted by start, in 32-bit fractions of the
// step. A frame fills a pixel buffer directly: each row is one line of colours, in which whatever is
// narrower than a pixel is blended, copied over the row's height; only wide instructions get text.
Tutti.parts.gantt = (element, data) => {
  const canvas = element.querySelector("canvas");
  const view = element.querySelector("[data-role=view]");
  const space = element.querySelector("[data-role=space]");
  const pen = canvas.getContext("2d");
  const [start, length, template, micro, path, pale] = ["start", "length", "template", "micro", "path", "pale"].map(
    (name) => Tutti.arrays[data[name]],
  );
  const { step, classes, tracks, kinds, templates, rows } = data;
  const FULL = 2 ** 32 - 1;
  const AXIS = 26;
  const LABELLED = 80; // up to so many classes each row has its name
  const WHOLE = 1500; // pixels: a chart that is not taller than this is shown whole
  let gutter = 168; // for names; narrower on a phone
  const many = classes.length > 20;
  const critical = new Uint8Array(start.length);
  path.forEach((item) => (critical[item] = 1));
  const rowEnd = rows.map((_, r) => (r + 1 < rows.length ? rows[r + 1][2] : start.length));
  const longest = rows.map(([, , first], r) => length.subarray(first, rowEnd[r]).reduce((a, b) => Math.max(a, b), 0));
  const state = { low: 0, high: 1, lanes: !many, path: false, color: "kind", hidden: new Set() };
  let layout = [];
  let theme = null;
  let ratio = 1;
  let width = 0;
  let height = 0;
  let pending = false;
  let selection = null;

  // --- geometry ---------------------------------------------------------------------------------

  function arrange() {
    const room = Math.min(window.innerHeight * 0.72, 820) - AXIS;
    // as tall as a label where every class gets one
    const least = classes.length <= LABELLED ? 12 : 8;
    const tall = many ? Math.max(least, Math.min(16, room / classes.length - 2)) : Math.max(16, Math.min(30, (room / classes.length) * 0.5));
    const low = many ? 3 : classes.length <= 10 ? 12 : 6;
    let y = 4;
    let current = -1;
    layout = [];
    rows.forEach(([owner, track], r) => {
      if (track !== 0 && !state.lanes) return;
      if (owner !== current) y += current < 0 ? 0 : many ? 2 : 8;
      const size = track === 0 ? tall : low;
      layout.push({ row: r, owner, track, y, size, head: owner !== current });
      current = owner;
      y += size + (many ? 0 : 1);
    });
    return y + 6;
  }

  function measure() {
    const content = arrange();
    width = view.clientWidth;
    gutter = width < 560 ? 96 : Math.min(Math.max(168, named()), width * 0.3);
    const whole = content + AXIS;
    const fits = whole <= WHOLE || matchMedia("print").matches;
    height = fits ? whole : Math.max(120, Math.min(whole, Math.min(window.innerHeight * 0.76, 900) - 2));
    view.style.maxHeight = fits ? "" : height + 2 + "px";
    ratio = Tutti.fit(canvas, width, height);
    space.style.height = Math.max(0, content + AXIS - height) + "px";
  }

  // What the names of the rows need: those of the classes, and beside their asides the lanes'.
  function named() {
    const widest = (index, font) => {
      pen.font = font;
      return classes.reduce((most, row) => Math.max(most, pen.measureText(row[index]).width), 0);
    };
    return Math.ceil(Math.max(widest(0, `${many ? 11 : 13}px system-ui, sans-serif`) + 24,
      many || classes.length > 10 ? 0 : widest(1, "11px system-ui, sans-serif") + 88));
  }

  const toX = (fraction) => gutter + ((fraction - state.low) / (state.high - state.low)) * (width - gutter);
  const toFraction = (x) => state.low + ((x - gutter) / (width - gutter)) * (state.high - state.low);

  // First item of a row that may reach into the view.
  function firstVisible(r, low) {
    const edge = Math.max(0, low * FULL - longest[r]);
    let a = rows[r][2];
    let b = rowEnd[r];
    while (a < b) {
      const middle = (a + b) >> 1;
      if (start[middle] < edge) a = middle + 1;
      else b = middle;
    }
    return a;
  }

  // --- colours ----------------------------------------------------------------------------------

  function readTheme() {
    theme = {
      ground: Tutti.color("ground"), panel: Tutti.color("panel"), line: Tutti.color("line"),
      text: Tutti.color("text"), quiet: Tutti.color("quiet"), critical: Tutti.color("critical"),
      accent: Tutti.color("accent"), kinds: kinds.map(([, color]) => Tutti.color(color)),
    };
    const dark = theme.ground[0] < 128;
    theme.micro = Array.from({ length: 64 }, (_, n) => wheel((n * 0.61803398875) % 1, dark ? 0.62 : 0.56));
  }

  function wheel(hue, light) {
    const part = (n) => {
      const k = (n + hue * 12) % 12;
      return Math.round(255 * (light - 0.55 * Math.min(light, 1 - light) * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
    };
    return [part(0), part(8), part(4)];
  }

  function fill(item) {
    const kind = templates[template[item]][0];
    if (state.color === "kind") return theme.kinds[kind];
    return micro[item] === 0 ? theme.quiet : theme.micro[(micro[item] - 1) % 64];
  }

  function strength(item) {
    const faint = state.hidden.has(templates[template[item]][0]) || (state.path && !critical[item]);
    return faint ? 0.16 : 1;
  }

  // --- drawing ----------------------------------------------------------------------------------

  function draw() {
    pending = false;
    const w = canvas.width;
    const h = canvas.height;
    const left = Math.round(gutter * ratio);
    const image = pen.createImageData(w, h);
    const pixels = new Uint32Array(image.data.buffer);
    pixels.fill(pack(theme.ground));
    const visible = layout.filter(({ y, size }) => y + size > view.scrollTop && y - view.scrollTop < height);
    const line = new Float32Array((w - left) * 4);
    const under = pale.length ? new Float32Array((w - left) * 4) : null;
    for (const place of visible) {
      const top = Math.max(AXIS * ratio, (AXIS + place.y - view.scrollTop) * ratio) | 0;
      const bottom = Math.min(h, (AXIS + place.y + place.size - view.scrollTop) * ratio) | 0;
      if (bottom > top) paintRow(place, line, under, pixels, { left, w, top, bottom });
    }
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.putImageData(image, 0, 0);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    visible.filter(({ size }) => size >= 14).forEach(writeRow);
    if (state.path) drawPath();
    drawGutter(visible);
    drawAxis();
    if (selection) {
      pen.fillStyle = Tutti.css(theme.accent, 0.18);
      pen.fillRect(Math.min(...selection), AXIS, Math.abs(selection[1] - selection[0]), height);
    }
  }

  const pack = (rgb) => (255 << 24) | (rgb[2] << 16) | (rgb[1] << 8) | rgb[0];

  // Pale items lie below: many may be under way at once, and together they are no darker than one.
  function paintRow(place, line, under, pixels, { left, w, top, bottom }) {
    line.fill(0);
    if (under) under.fill(0);
    const count = w - left;
    const scale = count / (state.high - state.low) / FULL;
    const origin = state.low * FULL;
    const until = state.high * FULL;
    for (let item = firstVisible(place.row, state.low); item < rowEnd[place.row]; item++) {
      if (start[item] > until) break;
      let a = (start[item] - origin) * scale;
      let b = a + length[item] * scale;
      if (length[item] === 0) b = a + ratio; // a moment: a Receive whose tensor had come
      if (b <= 0) continue;
      if (b - a > 5 * ratio) b -= ratio; // a hair between neighbours
      const rgb = fill(item);
      const alpha = strength(item);
      a = Math.max(0, a);
      b = Math.min(count, b);
      const below = under && pale[item];
      for (let column = a | 0; column < b; column++) {
        const part = alpha * (Math.min(b, column + 1) - Math.max(a, column));
        const at = column * 4;
        if (below) {
          if (0.3 * part > under[at + 3]) under.set([rgb[0], rgb[1], rgb[2], 0.3 * part], at);
          continue;
        }
        line[at] += rgb[0] * part;
        line[at + 1] += rgb[1] * part;
        line[at + 2] += rgb[2] * part;
        line[at + 3] += part;
      }
    }
    const base = place.track === 0 ? theme.panel : theme.ground;
    const first = top * w + left;
    for (let column = 0; column < count; column++) {
      const at = column * 4;
      const sum = line[at + 3];
      const scaleBy = sum > 1 ? 1 / sum : 1;
      const rest = sum > 1 ? 0 : 1 - sum;
      const cover = under ? under[at + 3] : 0;
      const mixed = (n) => line[at + n] * scaleBy + (cover ? under[at + n] * cover + base[n] * (1 - cover) : base[n]) * rest;
      pixels[first + column] = (255 << 24) | (mixed(2) << 16) | (mixed(1) << 8) | mixed(0);
    }
    for (let y = top + 1; y < bottom; y++) pixels.copyWithin(y * w + left, first, first + count);
  }

  function writeRow({ row, y, size }) {
    pen.font = `${Math.min(12, size - 4)}px system-ui, sans-serif`;
    pen.textBaseline = "middle";
    pen.textAlign = "center";
    const narrowest = (22 / (width - gutter)) * (state.high - state.low) * FULL;
    const middle = AXIS + y - view.scrollTop + size / 2;
    if (middle < AXIS + size / 2) return;
    let written = 0;
    for (let item = firstVisible(row, state.low); item < rowEnd[row] && written < 400; item++) {
      if (start[item] > state.high * FULL) break;
      if (length[item] < narrowest || strength(item) < 1) continue;
      const a = Math.max(gutter, toX(start[item] / FULL));
      const b = Math.min(width, toX((start[item] + length[item]) / FULL));
      if (b - a < 22) continue;
      const number = micro[item] ? String(micro[item] - 1) : "";
      const name = kinds[templates[template[item]][0]][0];
      const text = [`${name} ${number}`.trim(), number].find((t) => t && pen.measureText(t).width < b - a - 6);
      if (!text) continue;
      pen.fillStyle = Tutti.ink(fill(item));
      pen.fillText(text, (a + b) / 2, middle);
      written++;
    }
  }

  function drawPath() {
    const rowOf = new Map(layout.map((place) => [place.row, place]));
    pen.strokeStyle = Tutti.css(theme.critical);
    pen.lineWidth = 1.5;
    pen.save();
    pen.beginPath();
    pen.rect(gutter, AXIS, width - gutter, height - AXIS);
    pen.clip();
    pen.beginPath();
    for (const item of path) {
      const place = rowOf.get(findRow(item));
      if (!place) continue; // its lane is not shown: the line goes on to the next one
      const y = AXIS + place.y - view.scrollTop + place.size / 2;
      pen.lineTo(toX(start[item] / FULL), y);
      pen.lineTo(toX((start[item] + length[item]) / FULL), y);
    }
    pen.stroke();
    pen.restore();
  }

  function findRow(item) {
    let a = 0;
    let b = rows.length - 1;
    while (a < b) {
      const middle = (a + b + 1) >> 1;
      if (rows[middle][2] <= item) a = middle;
      else b = middle - 1;
    }
    return a;
  }

  function drawGutter(visible) {
    pen.fillStyle = Tutti.css(theme.ground);
    pen.fillRect(0, 0, gutter - 6, height);
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    let next = AXIS;
    for (const { owner, track, y, size, head } of visible) {
      const middle = AXIS + y - view.scrollTop + size / 2;
      if (head && middle >= next) {
        pen.fillStyle = Tutti.css(theme.text);
        pen.font = `${many ? 11 : 13}px system-ui, sans-serif`;
        pen.fillText(shortened(classes[owner][0], gutter - 20), 8, middle);
        next = middle + 12;
        if (!many && gutter > 120 && middle + 20 < height && classes.length <= 10) {
          pen.fillStyle = Tutti.css(theme.quiet);
          pen.font = "11px system-ui, sans-serif";
          pen.fillText(shortened(classes[owner][1], gutter - 80), 8, middle + 16);
        }
      } else if (!many && track !== 0 && size >= 9 && middle > AXIS) {
        pen.fillStyle = Tutti.css(theme.quiet);
        pen.font = "10.5px system-ui, sans-serif";
        pen.textAlign = "right";
        pen.fillText(tracks[track], gutter - 12, middle);
        pen.textAlign = "left";
      }
    }
  }

  // The name as the map and the tables write it where the whole one has no room, then cut.
  function shortened(name, room) {
    const wide = (text) => pen.measureText(text).width > room;
    if (!wide(name)) return name;
    let text = name.replace(/^pipeline (\d+) · stage (\d+)/, "stage $1.$2");
    if (!wide(text)) return text;
    while (text.length > 1 && wide(text + "…")) text = text.slice(0, -1);
    return text + "…";
  }

  function drawAxis() {
    pen.fillStyle = Tutti.css(theme.ground);
    pen.fillRect(0, 0, width, AXIS);
    pen.strokeStyle = Tutti.css(theme.line);
    pen.fillStyle = Tutti.css(theme.quiet);
    pen.lineWidth = 1;
    pen.font = "12px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.beginPath();
    pen.moveTo(0, AXIS - 0.5);
    pen.lineTo(width, AXIS - 0.5);
    for (const mark of Tutti.marks(state.low * step, state.high * step, (width - gutter) / 120)) {
      const x = Math.round(toX(mark / step)) + 0.5;
      pen.moveTo(x, AXIS - 5);
      pen.lineTo(x, AXIS);
      if (x < width - 24) pen.fillText(Tutti.moment(mark, (state.high - state.low) * step, step), Math.max(x, gutter + 14), AXIS / 2 - 2);
    }
    pen.stroke();
  }

  function schedule() {
    if (!pending) requestAnimationFrame(draw);
    pending = true;
  }

  // --- moving about -----------------------------------------------------------------------------

  function show(low, high) {
    const span = Math.min(1, Math.max(high - low, 2e-8));
    state.low = Math.min(Math.max(0, low), 1 - span);
    state.high = state.low + span;
    schedule();
  }

  function zoom(factor, x = (gutter + width) / 2) {
    const center = toFraction(Math.max(gutter, x));
    show(center - (center - state.low) * factor, center + (state.high - center) * factor);
  }

  const pan = (part) => show(state.low + part * (state.high - state.low), state.high + part * (state.high - state.low));

  function under(event) {
    const frame = canvas.getBoundingClientRect();
    const x = event.clientX - frame.left;
    const y = event.clientY - frame.top - AXIS + view.scrollTop;
    const place = layout.find((p) => y >= p.y - 1 && y < p.y + p.size + 1);
    if (!place || x < gutter || event.clientY - frame.top < AXIS) return [place, -1];
    const near = (1.5 / (width - gutter)) * (state.high - state.low) * FULL;
    const at = toFraction(x) * FULL;
    let best = -1;
    for (let item = firstVisible(place.row, toFraction(x) - near / FULL); item < rowEnd[place.row]; item++) {
      if (start[item] > at + near) break;
      if (start[item] + length[item] >= at - near) best = item;
      if (start[item] <= at && start[item] + length[item] > at) break;
    }
    return [place, best];
  }

  function hover(event) {
    const [place, item] = under(event);
    if (!place) return Tutti.tip(event, "");
    const [name, chip, detail] = classes[place.owner];
    if (item < 0) return Tutti.tip(event, event.offsetX < gutter ? name : "", [chip, detail]);
    const lines = [`${name} · ${chip} · ${tracks[place.track]}`];
    if (micro[item]) lines.push(`micro-batch ${micro[item] - 1}`);
    lines.push(`${Tutti.seconds((length[item] / FULL) * step)}, from ${Tutti.seconds((start[item] / FULL) * step)}`);
    if (critical[item]) lines.push("on the critical path");
    return Tutti.tip(event, templates[template[item]][1], lines);
  }

  canvas.addEventListener("pointerdown", (event) => {
    const frame = canvas.getBoundingClientRect();
    const from = event.clientX - frame.left;
    const { low, high } = state;
    const top = view.scrollTop;
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("moving");
    Tutti.tip(event, "");
    const move = (next) => {
      const to = next.clientX - frame.left;
      if (event.shiftKey) {
        selection = [from, to];
        schedule();
        return;
      }
      const shift = ((from - to) / (width - gutter)) * (high - low);
      show(low + shift, high + shift);
      if (event.pointerType === "mouse") view.scrollTop = top + event.clientY - next.clientY;
    };
    const up = () => {
      canvas.classList.remove("moving");
      canvas.removeEventListener("pointermove", move);
      if (selection && Math.abs(selection[1] - selection[0]) > 4) {
        const [a, b] = selection.map(toFraction).sort((p, q) => p - q);
        show(Math.max(0, a), Math.min(1, b));
      }
      selection = null;
      schedule();
    };
    canvas.addEventListener("pointermove", move);
    canvas.addEventListener("pointerup", up, { once: true });
    canvas.addEventListener("pointercancel", up, { once: true });
  });
  canvas.addEventListener("pointermove", (event) => event.buttons || hover(event));
  canvas.addEventListener("pointerleave", (event) => Tutti.tip(event, ""));
  canvas.addEventListener("dblclick", (event) => zoom(0.4, event.offsetX));
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(Math.max(-0.5, Math.min(0.5, event.deltaY * 0.004))), event.offsetX);
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / (width - gutter));
    else return;
    event.preventDefault();
  }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const act = {
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1.6), 0: () => show(0, 1),
      ArrowLeft: () => pan(-0.15), ArrowRight: () => pan(0.15),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey) return;
    act();
    event.preventDefault();
  });
  view.addEventListener("scroll", schedule);

  // --- controls ---------------------------------------------------------------------------------

  const control = (name) => element.querySelector(`[data-act=${name}]`);
  control("in").addEventListener("click", () => zoom(0.6));
  control("out").addEventListener("click", () => zoom(1.6));
  control("fit").addEventListener("click", () => show(0, 1));
  control("color").addEventListener("change", (event) => {
    state.color = event.target.value;
    schedule();
  });
  // A link may carry a view: #view=0.1,0.2&color=micro&path=1&lanes=0
  const wanted = new URLSearchParams(location.hash.slice(1));
  const range = (wanted.get("view") || "").split(",").map(Number);
  if (range.length === 2 && range[0] < range[1]) [state.low, state.high] = range;
  if (wanted.has("color")) state.color = control("color").value = wanted.get("color");
  if (wanted.has("path")) state.path = control("path").checked = wanted.get("path") === "1";
  if (wanted.has("lanes")) state.lanes = wanted.get("lanes") === "1";
  control("lanes").checked = state.lanes;
  control("lanes").addEventListener("change", (event) => {
    state.lanes = event.target.checked;
    measure();
    schedule();
  });
  control("path").addEventListener("change", (event) => {
    state.path = event.target.checked;
    schedule();
  });
  const present = [...new Set(templates.map(([kind]) => kind))];
  Tutti.legend(element.querySelector("[data-role=legend]"), present.map((kind) => ({
    name: kinds[kind][0],
    color: `var(--${kinds[kind][1]})`,
    press: (on) => {
      if (on) state.hidden.delete(kind);
      else state.hidden.add(kind);
      schedule();
    },
  })));
  canvas.setAttribute("aria-label", `Timeline of ${start.length} instructions of ${classes.length} classes of ranks over ${Tutti.seconds(step)}`);

  return () => {
    readTheme();
    measure();
    draw();
  };
};
