// The cluster map. Each pool has a canvas; nodes flow over its width like words over a line, all in
// the largest cell size that keeps the map about one screen high. `owner` says of each chip 0: idle,
// 1: spare, else its group of replicas + 2; `place` where in the group it stands (tensor fastest).
Tutti.parts.cluster = (element, data) => {
  const { pools, groups } = data;
  const IDLE = 0;
  const SPARE = 1;
  const FIRST = 2;
  const CELLS = [44, 38, 34, 28, 22, 18, 15, 12, 10, 8, 7, 6, 5, 4, 3, 2];
  const figures = [...element.querySelectorAll("figure")];
  const several = groups.some(([pipeline]) => pipeline > 0);
  const chosen = new Set(); // groups that the legend singles out
  let colors = [];
  let inks = [];
  let theme = {};
  let hovered = null;

  const views = pools.map((pool, index) => {
    const slots = pool.blocks.reduce((count, [, list]) => count + list.length, 0);
    return {
      ...pool, index, slots, figure: figures[index], canvas: figures[index].querySelector("canvas"),
      owner: Tutti.arrays[pool.owner], place: Tutti.arrays[pool.place], at: null,
    };
  });

  // --- geometry ---------------------------------------------------------------------------------

  // Where each slot of a node is drawn, and how large the node is.
  function nodeShape(view, cell) {
    const gap = cell >= 12 ? 2 : cell >= 4 ? 1 : 0;
    const pad = cell >= 12 ? 4 : cell >= 6 ? 2 : 1;
    const head = cell >= 15 ? 15 : 0;
    const frames = [];
    const cells = new Array(view.slots);
    let x = pad;
    let height = 0;
    view.blocks.forEach(([kind, slots]) => {
      const count = slots.length;
      const columns = count <= 4 ? count : count <= 8 ? 4 : count <= 32 ? Math.ceil(count / 2) : Math.ceil(Math.sqrt(count * 2));
      const rows = Math.ceil(count / columns);
      const inner = kind && cell >= 6 ? pad : 0;
      slots.forEach((slot, n) => {
        cells[slot] = [x + inner + (n % columns) * (cell + gap), pad + head + inner + Math.floor(n / columns) * (cell + gap)];
      });
      const size = [columns * (cell + gap) - gap + 2 * inner, rows * (cell + gap) - gap + 2 * inner];
      if (kind) frames.push([x, pad + head, ...size, kind]);
      x += size[0] + (cell >= 6 ? pad : 2);
      height = Math.max(height, size[1]);
    });
    const between = cell >= 12 ? 8 : cell >= 6 ? 4 : 2;
    return { cell, gap, cells, frames, head, width: x - (cell >= 6 ? pad : 2) + pad, height: height + 2 * pad + head, between };
  }

  function arrange(view, cell, width) {
    const shape = nodeShape(view, cell);
    const columns = Math.max(1, Math.min(view.nodes, Math.floor((width + shape.between) / (shape.width + shape.between))));
    const rows = Math.ceil(view.nodes / columns);
    return { ...shape, columns, rows, tall: rows * (shape.height + shape.between) - shape.between, fits: shape.width <= width };
  }

  function measure() {
    const width = element.clientWidth;
    const room = Math.max(420, Math.min(900, window.innerHeight * 0.85)) * (width < 600 ? 1.3 : 1);
    for (const cell of CELLS) {
      const found = views.map((view) => arrange(view, cell, width));
      const tall = found.reduce((sum, { tall }) => sum + tall, 0);
      if ((tall <= room && found.every(({ fits }) => fits)) || cell === CELLS.at(-1)) {
        views.forEach((view, index) => (view.at = found[index]));
        return;
      }
    }
  }

  const corner = (at, node) => [(node % at.columns) * (at.width + at.between), Math.floor(node / at.columns) * (at.height + at.between)];

  // --- colours ----------------------------------------------------------------------------------

  function readTheme() {
    const style = getComputedStyle(document.documentElement);
    const base = parseFloat(style.getPropertyValue("--stage-l"));
    const chroma = parseFloat(style.getPropertyValue("--stage-c"));
    colors = groups.map((group) => `oklch(${base + group[9]} ${chroma} ${group[8]})`);
    inks = groups.map((group) => (base + group[9] > 0.6 ? "#10151d" : "#ffffff"));
    theme = {};
    for (const name of ["ground", "panel", "line", "text", "quiet"]) theme[name] = Tutti.css(Tutti.color(name));
  }

  // Diagonal strokes for chips without work; crossed for spares.
  function hatch(pen, ratio, crossed) {
    const tile = document.createElement("canvas");
    const size = Math.round(6 * ratio);
    tile.width = tile.height = size;
    const brush = tile.getContext("2d");
    brush.strokeStyle = theme.quiet;
    brush.lineWidth = 0.9 * ratio;
    brush.beginPath();
    for (const shift of [-size, 0, size]) {
      brush.moveTo(shift - 1, size + 1);
      brush.lineTo(shift + size + 1, -1);
      if (!crossed) continue;
      brush.moveTo(shift - 1, -1);
      brush.lineTo(shift + size + 1, size + 1);
    }
    brush.stroke();
    const pattern = pen.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / ratio));
    return pattern;
  }

  // --- drawing ----------------------------------------------------------------------------------

  function draw(view) {
    const { at, canvas } = view;
    const width = Math.min(element.clientWidth, at.columns * (at.width + at.between));
    const ratio = Tutti.fit(canvas, width, at.tall + 2);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const idle = hatch(pen, ratio, false);
    const spare = hatch(pen, ratio, true);
    pen.textBaseline = "middle";
    let drawn = 0;
    for (let node = 0; node < view.nodes; node++) {
      const [left, top] = corner(at, node);
      box(pen, view, node, left, top);
      pen.textAlign = "center";
      pen.font = `600 ${Math.min(13, at.cell * 0.5)}px system-ui, sans-serif`;
      for (let slot = 0; slot < view.slots; slot++, drawn++) {
        const owner = view.owner[node * view.slots + slot];
        const [x, y] = [left + at.cells[slot][0], top + at.cells[slot][1]];
        pen.globalAlpha = chosen.size && !chosen.has(owner - FIRST) ? 0.15 : 1;
        // a caller may colour chips by a figure: `paint` gives [colour, ink], or nothing
        const painted = data.paint ? data.paint(view.index, node * view.slots + slot) : null;
        pen.fillStyle = painted ? painted[0] : owner < FIRST || data.paint ? (owner === SPARE ? spare : idle) : colors[owner - FIRST];
        pen.fillRect(x, y, at.cell, at.cell);
        if ((data.paint ? !painted : owner < FIRST) && at.cell >= 5) {
          pen.strokeStyle = theme.line;
          pen.strokeRect(x + 0.5, y + 0.5, at.cell - 1, at.cell - 1);
        }
        if (owner >= FIRST && at.cell >= 18) {
          const [pipeline, stage] = groups[owner - FIRST];
          pen.fillStyle = painted ? painted[1] : data.paint ? theme.quiet : inks[owner - FIRST];
          pen.fillText(several && at.cell >= 28 ? `${pipeline}.${stage}` : `${stage}`, x + at.cell / 2, y + at.cell / 2 + 1);
        }
      }
      pen.globalAlpha = 1;
    }
    if (hovered && hovered.view === view) outline(pen, view);
    return drawn;
  }

  function box(pen, view, node, left, top) {
    const { at } = view;
    pen.lineWidth = 1;
    pen.fillStyle = theme.panel;
    pen.strokeStyle = theme.line;
    pen.beginPath();
    pen.roundRect(left + 0.5, top + 0.5, at.width, at.height, at.cell >= 12 ? 6 : at.cell >= 6 ? 2 : 0);
    pen.fill();
    if (at.cell >= 6) pen.stroke();
    if (at.cell >= 6) {
      pen.fillStyle = theme.ground;
      for (const [x, y, w, h] of at.frames) {
        pen.beginPath();
        pen.roundRect(left + x - 0.5, top + y - 0.5, w + 1, h + 1, at.cell >= 12 ? 4 : 1);
        pen.fill();
        pen.stroke();
      }
    }
    if (at.head) {
      pen.fillStyle = theme.quiet;
      pen.textAlign = "left";
      pen.font = "11px system-ui, sans-serif";
      pen.fillText(at.width > 60 ? `node ${node}` : `${node}`, left + 5, top + 10);
    }
  }

  // Frame the chips of the replica that is pointed at.
  function outline(pen, view) {
    const { at } = view;
    const mine = replicaOf(hovered.owner, hovered.place);
    pen.strokeStyle = theme.text;
    pen.lineWidth = at.cell >= 10 ? 2 : 1;
    for (let chip = 0; chip < view.owner.length; chip++) {
      const same = hovered.owner >= FIRST
        ? view.owner[chip] === hovered.owner && replicaOf(hovered.owner, view.place[chip]) === mine
        : chip === hovered.chip;
      if (!same) continue;
      const [left, top] = corner(at, Math.floor(chip / view.slots));
      const [x, y] = at.cells[chip % view.slots];
      pen.strokeRect(left + x, top + y, at.cell, at.cell);
    }
  }

  function replicaOf(owner, place) {
    if (owner < FIRST) return -1;
    const [, , , , tp, cp] = groups[owner - FIRST];
    return Math.floor(place / (tp * cp));
  }

  // --- words ------------------------------------------------------------------------------------

  function find(view, x, y) {
    const { at } = view;
    const column = Math.floor(x / (at.width + at.between));
    const row = Math.floor(y / (at.height + at.between));
    const node = row * at.columns + column;
    if (column >= at.columns || row < 0 || column < 0 || node >= view.nodes) return null;
    const [left, top] = corner(at, node);
    const slack = at.gap / 2 + 0.5;
    const slot = at.cells.findIndex(([cx, cy]) => x - left >= cx - slack && x - left <= cx + at.cell + slack && y - top >= cy - slack && y - top <= cy + at.cell + slack);
    if (slot < 0) return null;
    const chip = node * view.slots + slot;
    return { view, node, slot, chip, owner: view.owner[chip], place: view.place[chip] };
  }

  function words({ view, owner, place }) {
    if (owner === IDLE) return [view.chip, "no work in this plan"];
    if (owner === SPARE) return [view.chip, "spare: takes over when a chip fails"];
    const [pipeline, stage, before, replicas, tp, cp, sequences, units] = groups[owner - FIRST];
    const copy = Math.floor(place / (tp * cp));
    const inner = place % (tp * cp);
    const lines = [view.chip, `${several ? `pipeline ${pipeline}, ` : ""}stage ${stage}: ${units}`];
    lines.push(`replica ${before + copy} of ${replicas}, ${sequences} sequence${sequences === 1 ? "" : "s"} per micro-batch`);
    if (tp * cp > 1) lines.push([tp > 1 && `tensor ${inner % tp} of ${tp}`, cp > 1 && `context ${Math.floor(inner / tp)} of ${cp}`].filter(Boolean).join(", "));
    return lines;
  }

  function point(event, found) {
    const same = found && hovered && found.view === hovered.view && found.chip === hovered.chip;
    const touched = [hovered, found].filter(Boolean).map(({ view }) => view);
    const moved = !same && (found || hovered);
    hovered = found;
    if (moved) new Set(touched).forEach(draw);
    if (!found) Tutti.tip(event, "");
    else Tutti.tip(event, `${found.view.name}/${found.node}/${found.slot}`, [...(data.tell ? data.tell(found.view.index, found.chip) : []), ...words(found)]);
  }

  for (const view of views) {
    const { canvas } = view;
    const chip = (event) => find(view, event.offsetX, event.offsetY);
    canvas.addEventListener("pointermove", (event) => point(event, chip(event)));
    canvas.addEventListener("pointerdown", (event) => point(event, chip(event)));
    canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && point(event, null));
    canvas.addEventListener("blur", (event) => point(event, null));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: view.slots, ArrowUp: -view.slots }[event.key];
      if (!step) return;
      event.preventDefault();
      const from = hovered && hovered.view === view ? hovered.chip : -1;
      const to = from < 0 ? 0 : Math.max(0, Math.min(view.owner.length - 1, from + step));
      const [node, slot] = [Math.floor(to / view.slots), to % view.slots];
      const [left, top] = corner(view.at, node);
      const frame = canvas.getBoundingClientRect();
      const at = { clientX: frame.left + left + view.at.cells[slot][0], clientY: frame.top + top + view.at.cells[slot][1] + view.at.cell };
      point(at, { view, node, slot, chip: to, owner: view.owner[to], place: view.place[to] });
    });
  }

  // --- legend -----------------------------------------------------------------------------------

  function legend() {
    const list = element.querySelector("[data-role=legend]");
    const stages = new Map();
    groups.forEach(([pipeline, stage], index) => {
      const key = several ? `${pipeline}.${stage}` : `${stage}`;
      stages.set(key, [...(stages.get(key) || []), index]);
    });
    const used = views.reduce((found, { owner }) => owner.reduce((f, o) => f | (o === IDLE ? 1 : o === SPARE ? 2 : 0), found), 0);
    list.classList.toggle("dense", stages.size > 16);
    const items = [...stages].map(([key, members]) => {
      const button = document.createElement("button");
      const swatch = document.createElement("i");
      button.type = "button";
      button.title = "Show only this stage";
      swatch.style.background = colors[members[0]];
      button.setAttribute("aria-pressed", String(!chosen.size || chosen.has(members[0])));
      button.append(swatch, stages.size > 16 ? key : `stage ${key}`);
      button.addEventListener("click", () => {
        members.forEach((index) => (chosen.has(index) ? chosen.delete(index) : chosen.add(index)));
        legend();
        views.forEach(draw);
      });
      const item = document.createElement("li");
      item.append(button);
      return item;
    });
    for (const [bit, name, text] of [[1, "idle", "no work"], [2, "spare", "spare"]]) {
      if (!(used & bit)) continue;
      const item = document.createElement("li");
      const swatch = document.createElement("i");
      swatch.className = `hatch ${name}`;
      item.append(swatch, text);
      items.push(item);
    }
    list.replaceChildren(...items);
  }

  for (const view of views) {
    const busy = view.owner.reduce((count, owner) => count + (owner >= FIRST), 0);
    view.canvas.setAttribute("aria-label", `Map of the ${view.owner.length} chips of ${view.name}: ${busy} take part. Arrow keys walk from chip to chip.`);
  }

  return () => {
    readTheme();
    measure();
    if (!data.paint) legend();
    element.dataset.chips = views.reduce((count, view) => count + draw(view), 0);
  };
};
