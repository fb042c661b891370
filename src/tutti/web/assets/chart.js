// One chart over steps. `lines` are {name, color, values, dash}; all share `steps`. `marks` are {at, name}.
const { html, render, useState, useEffect, useRef, useLayoutEffect } = htmPreact;

// Distances between marks of the steps' axis: whole ones.
const STEPS = Array.from({ length: 9 }, (_, k) => [1, 2, 5].map((n) => n * 10 ** k)).flat();

function Chart({ title, steps, lines, text, zero, marks = [] }) {
  const box = useRef(null);
  const made = useRef(null);
  const shape = lines.map(({ name, color, dash }) => `${name}${color}${dash}`).join("|");
  const theme = useTheme();
  const marked = useRef(marks);
  marked.current = marks;

  useLayoutEffect(() => {
    const css = (name) => Tutti.css(Tutti.color(name));
    const axis = { stroke: css("quiet"), grid: { stroke: css("line"), width: 1 }, ticks: { stroke: css("line"), width: 1 }, font: "12px system-ui, sans-serif" };
    const drawn = box.current.clientWidth;
    const options = {
      width: Math.max(280, drawn), height: 240,
      scales: { x: { time: false }, y: { range: (_, low, high) => bounds(low, high, zero) } },
      axes: [{ ...axis, incrs: STEPS }, { ...axis, size: 64, values: (_, marks) => marks.map((v) => text(v)) }],
      legend: { live: true }, padding: [18, null, null, null],
      hooks: { draw: [(plot) => drawMarks(plot, marked.current, css("quiet"))] },
      series: [
        { label: "step" },
        ...lines.map(({ name, color, dash }) => ({
          label: name, stroke: css(color), width: 2, dash: dash ? [6, 5] : undefined, spanGaps: true,
          points: { show: steps.length < 40, size: 5 }, value: (_, v) => (v === null ? "–" : text(v)),
        })),
      ],
    };
    const plot = new uPlot(options, data(), box.current);
    made.current = plot;
    const stop = onWidth(box.current, (width) => plot.setSize({ width: Math.max(280, width), height: 240 }), drawn);
    return () => {
      stop();
      plot.destroy();
      made.current = null;
    };
  }, [shape, theme, steps.length < 40]);

  const data = () => [steps, ...lines.map(({ values }) => values)];
  useEffect(() => made.current && made.current.setData(data()));
  const last = lines.map(({ name, values }) => `${name} ${text(values.findLast((v) => v !== null) ?? null)}`).join(", ");
  return html`<figure class="chart"><figcaption>${title}</figcaption><div ref=${box} role="img" aria-label=${`${title} over ${steps.length} steps; at the end ${last}${marks.map(({ at, name }) => `; ${name} from step ${at}`).join("")}`}></div></figure>`;
}

// Upright lines where something began, numbered where there is room.
function drawMarks(plot, marks, color) {
  const { ctx: pen, bbox } = plot;
  const inside = marks.filter(({ at }) => at >= plot.scales.x.min && at <= plot.scales.x.max);
  const ratio = devicePixelRatio;
  pen.save();
  pen.strokeStyle = pen.fillStyle = color;
  pen.lineWidth = ratio;
  pen.setLineDash([2 * ratio, 3 * ratio]);
  pen.font = `${11 * ratio}px system-ui, sans-serif`;
  pen.textAlign = "right";
  pen.textBaseline = "bottom";
  let free = -Infinity;
  for (const { at, name } of inside) {
    const x = Math.round(plot.valToPos(at, "x", true));
    pen.beginPath();
    pen.moveTo(x, bbox.top);
    pen.lineTo(x, bbox.top + bbox.height);
    pen.stroke();
    const wide = pen.measureText(name).width + 6 * ratio;
    if (x - wide >= Math.max(free, bbox.left)) {
      pen.fillText(name, x + 2 * ratio, bbox.top - 3 * ratio);
      free = x;
    }
  }
  pen.restore();
}

function bounds(low, high, zero) {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [0, 1];
  if (zero) low = Math.min(0, low);
  const pad = (high - low || Math.abs(high) || 1) * 0.06;
  return [zero && low === 0 ? 0 : low - pad, high + pad];
}

// Changes when the reader's colour scheme does.
function useTheme() {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const [dark, set] = useState(query.matches);
  useEffect(() => {
    const heard = () => set(query.matches);
    query.addEventListener("change", heard);
    return () => query.removeEventListener("change", heard);
  }, []);
  return dark;
}

// Call when an element got another width than what is in it was drawn for, after the frame in which it did; returns how to stop.
// Drawing itself may change the width (a scroll bar comes, a neighbour takes its half), so `drawn` is what it was before.
function onWidth(element, call, drawn = element.clientWidth) {
  let [known, frame] = [drawn, 0];
  const watcher = new ResizeObserver(() => {
    if (element.clientWidth === known) return;
    known = element.clientWidth;
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(() => call(known));
  });
  watcher.observe(element);
  return () => {
    cancelAnimationFrame(frame);
    watcher.disconnect();
  };
}
