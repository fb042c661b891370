// Memory over time: one line per class of ranks, dashed limits, the nearest line on hover.
Tutti.parts.memory = (element, data) => {
  const canvas = element.querySelector("canvas");
  const box = canvas.parentElement;
  const values = Tutti.arrays[data.values];
  const { points, series, groups, limits, step } = data;
  const own = series.length <= 8; // few lines have a colour each, many one per chip
  const colorOf = (index) => "series-" + (1 + ((own ? index : series[index][1]) % 8));
  let hovered = -1;
  let area = null;

  const peak = values.reduce((most, value) => Math.max(most, value), 0);
  const highest = limits.reduce((most, [limit]) => Math.max(most, limit), peak) * 1.06 || 1;
  const x = (slice) => area.left + ((slice + 0.5) / points) * area.width;
  const y = (bytes) => area.top + (1 - bytes / highest) * area.height;

  function draw() {
    const width = box.clientWidth - 12;
    const height = box.clientHeight - 12;
    const ratio = Tutti.fit(canvas, width, height);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    area = { left: 78, top: 8, width: width - 90, height: height - 34 };
    pen.font = "12px system-ui, sans-serif";
    axes(pen);
    const thin = own ? 1.75 : 1;
    for (let index = 0; index < series.length; index++) line(pen, index, thin, own ? 1 : 0.45);
    line(pen, data.tightest, 2.75, 1);
    if (hovered >= 0) line(pen, hovered, 2.75, 1);
  }

  function axes(pen) {
    const quiet = Tutti.css(Tutti.color("quiet"));
    pen.strokeStyle = Tutti.css(Tutti.color("line"));
    pen.fillStyle = quiet;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const unit = 1024 ** Math.max(0, Math.floor(Math.log2(highest) / 10));
    for (const mark of Tutti.marks(0, highest / unit, 6)) {
      const at = Math.round(y(mark * unit)) + 0.5;
      pen.beginPath();
      pen.moveTo(area.left, at);
      pen.lineTo(area.left + area.width, at);
      pen.stroke();
      pen.fillText(Tutti.bytes(mark * unit), area.left - 8, at);
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const mark of Tutti.marks(0, step, area.width / 110)) {
      pen.fillText(Tutti.moment(mark, step, step), area.left + (mark / step) * area.width, area.top + area.height + 8);
    }
    pen.setLineDash([7, 5]);
    pen.strokeStyle = Tutti.css(Tutti.color("alarm"));
    pen.fillStyle = pen.strokeStyle;
    pen.lineWidth = 1.5;
    pen.textAlign = "right";
    let taken = -Infinity; // names of limits that lie together stand below each other
    for (const [limit, name] of [...limits].reverse()) {
      pen.beginPath();
      pen.moveTo(area.left, y(limit));
      pen.lineTo(area.left + area.width, y(limit));
      pen.stroke();
      taken = Math.max(y(limit) + 4, taken + 14);
      pen.fillText(`${name} ${Tutti.bytes(limit)}`, area.left + area.width - 4, taken);
    }
    pen.setLineDash([]);
  }

  function line(pen, index, width, alpha) {
    pen.strokeStyle = Tutti.css(Tutti.color(colorOf(index)), alpha);
    pen.lineWidth = width;
    pen.lineJoin = "round";
    pen.beginPath();
    for (let slice = 0; slice < points; slice++) {
      pen.lineTo(x(slice), y(values[index * points + slice]));
    }
    pen.stroke();
  }

  canvas.addEventListener("pointermove", (event) => {
    const frame = canvas.getBoundingClientRect();
    const at = ((event.clientX - frame.left - area.left) / area.width) * points;
    const slice = Math.min(points - 1, Math.max(0, Math.floor(at)));
    let best = -1;
    let least = 24;
    for (let index = 0; index < series.length; index++) {
      const gap = Math.abs(y(values[index * points + slice]) - (event.clientY - frame.top));
      if (gap < least) [best, least] = [index, gap];
    }
    if (best !== hovered) {
      hovered = best;
      draw();
    }
    Tutti.tip(event, best < 0 ? "" : series[best][0], best < 0 ? [] : [
      groups[series[best][1]],
      `${Tutti.bytes(values[best * points + slice])} at ${Tutti.seconds(((slice + 0.5) / points) * step)}`,
    ]);
  });
  canvas.addEventListener("pointerleave", (event) => {
    hovered = -1;
    Tutti.tip(event, "");
    draw();
  });

  return () => {
    const names = own ? series.map(([name], i) => [name, colorOf(i)]) : groups.map((name, i) => [name, "series-" + (1 + (i % 8))]);
    const entries = names.map(([name, color]) => ({ name, color: `var(--${color})` }));
    if (limits.length) entries.push({ name: "memory of a chip", dash: true });
    Tutti.legend(element.querySelector("[data-role=legend]"), entries);
    draw();
  };
};
