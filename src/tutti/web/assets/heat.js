// A matrix as a picture: rows are ranks, nodes or links, columns are seconds. Columns that arrive are
// appended, those that are older than the span fall off, so that memory does not grow.
class Matrix {
  constructor(found) {
    this.rows = found.rows;
    this.figure = found.figure;
    this.seconds = found.seconds;
    this.columns = Matrix.cut(found);
  }
  static cut(found) {
    const values = Format.unpack(found.values);
    const [height, width] = [found.rows.length, found.seconds.length];
    return found.seconds.map((_, c) => {
      const column = new Float32Array(height);
      for (let r = 0; r < height; r++) column[r] = values[r * width + c];
      return column;
    });
  }
  fits(found) {
    return found.figure === this.figure && found.rows.length === this.rows.length && found.rows.every((name, i) => name === this.rows[i]);
  }
  add(found, span) {
    this.seconds = [...this.seconds, ...found.seconds];
    this.columns = [...this.columns, ...Matrix.cut(found)];
    const first = this.seconds.at(-1) - span;
    const old = this.seconds.findIndex((second) => second > first);
    if (old > 0) {
      this.seconds = this.seconds.slice(old);
      this.columns = this.columns.slice(old);
    }
  }
  value(row, column, relative) {
    const found = this.columns[column][row];
    return relative ? found / this.middle(column) : found;
  }
  middle(column) {
    this.middles ||= new WeakMap();
    const values = this.columns[column];
    if (!this.middles.has(values)) {
      const known = values.filter(Number.isFinite).sort();
      this.middles.set(values, known.length ? known[known.length >> 1] : NaN);
    }
    return this.middles.get(values);
  }
  all(relative) {
    const found = [];
    const every = Math.max(1, Math.floor((this.rows.length * this.columns.length) / 20000));
    for (let i = 0; i < this.rows.length * this.columns.length; i += every) {
      found.push(this.value(i % this.rows.length, Math.floor(i / this.rows.length), relative));
    }
    return found;
  }
}

function Heat({ matrix, rate, relative, version }) {
  const canvas = useRef(null);
  const at = useRef(null);
  const theme = useTheme();
  const text = (value) => (relative ? `${value.toFixed(2)} × the median` : Format.figure(matrix.figure, rate, value));

  useLayoutEffect(() => {
    const draw = () => paint(canvas.current, matrix, relative, at);
    const around = canvas.current.parentElement;
    const drawn = around.clientWidth;
    draw();
    return onWidth(around, draw, drawn);
  }, [matrix, version, relative, theme]);

  const show = (event, row, column) => {
    if (row === null || !matrix.rows[row] || !matrix.columns[column]) return Tutti.tip(event, "");
    const value = matrix.value(row, column, relative);
    const lines = [Number.isFinite(value) ? text(value) : "no value", Format.time(matrix.seconds[column])];
    Tutti.tip(event, matrix.rows[row], lines);
  };
  const find = (event) => {
    const { left, top, cell, tall } = canvas.current.places;
    const column = Math.floor((event.offsetX - left) / cell);
    const row = Math.floor((event.offsetY - top) / tall);
    const inside = column >= 0 && row >= 0 && column < matrix.columns.length && row < matrix.rows.length;
    return inside ? [row, column] : [null, null];
  };
  const keys = (event) => {
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [row, column] = at.current || [0, matrix.columns.length - 1 - step[1]];
    at.current = [clamp(row + step[0], matrix.rows.length), clamp(column + step[1], matrix.columns.length)];
    paint(canvas.current, matrix, relative, at);
    const { left, top, cell, tall } = canvas.current.places;
    const frame = canvas.current.getBoundingClientRect();
    show({ clientX: frame.left + left + cell * at.current[1], clientY: frame.top + top + tall * at.current[0] }, ...at.current);
  };
  const leave = (event) => {
    at.current = null;
    Tutti.tip(event, "");
    paint(canvas.current, matrix, relative, at);
  };
  return html`<div class="picture"><canvas ref=${canvas} tabindex="0" role="img"
    aria-label=${`${Format.name(matrix.figure)} of ${matrix.rows.length} rows over ${matrix.columns.length} moments. Arrow keys walk from cell to cell.`}
    onPointerMove=${(event) => show(event, ...find(event))} onPointerLeave=${(event) => Tutti.tip(event, "")}
    onKeyDown=${keys} onBlur=${leave}></canvas></div>
    <${Scale} range=${Format.range(matrix.all(relative))} text=${text} />`;
}

const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));

// One pixel per value, row by row; none where there is no value.
function shade(pixels, matrix, relative, [low, high]) {
  const ramp = Format.ramp();
  const colours = Uint32Array.from({ length: 256 }, (_, i) => ((255 << 24) | (ramp[3 * i + 2] << 16) | (ramp[3 * i + 1] << 8) | ramp[3 * i]) >>> 0);
  const [rows, columns] = [matrix.rows.length, matrix.columns.length];
  for (let c = 0; c < columns; c++) {
    const values = matrix.columns[c];
    const unit = relative ? matrix.middle(c) : 1;
    const [zero, scale] = [low * unit, 255 / ((high - low) * unit)];
    for (let r = 0; r < rows; r++) {
      const value = values[r];
      if (Number.isFinite(value / unit)) pixels[r * columns + c] = colours[Math.max(0, Math.min(255, Math.round((value - zero) * scale)))];
    }
  }
}

function paint(canvas, matrix, relative, at) {
  const [rows, columns] = [matrix.rows.length, matrix.columns.length];
  const width = canvas.parentElement.clientWidth;
  const tall = Math.max(rows > 500 ? 1 : 2, Math.min(22, Math.floor(620 / Math.max(1, rows))));
  const labelled = tall >= 11;
  const left = labelled ? Math.min(180, 14 + 7 * matrix.rows.reduce((most, name) => Math.max(most, name.length), 0)) : 64;
  const [top, below] = [4, 26];
  const cell = Math.max(0.5, (width - left - 8) / Math.max(1, columns));
  const ratio = Tutti.fit(canvas, width, top + tall * rows + below);
  const pen = canvas.getContext("2d");
  canvas.places = { left, top, cell, tall };
  const range = Format.range(matrix.all(relative));
  const image = new ImageData(Math.max(1, columns), Math.max(1, rows));
  shade(new Uint32Array(image.data.buffer), matrix, relative, range);
  const small = new OffscreenCanvas(image.width, image.height);
  small.getContext("2d").putImageData(image, 0, 0);
  pen.scale(ratio, ratio);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, left, top, cell * columns, tall * rows);
  pen.fillStyle = Tutti.css(Tutti.color("quiet"));
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const every = labelled ? 1 : Math.ceil((rows * 16) / Math.max(16, tall * rows)) || 1;
  for (let r = 0; r < rows; r += every) {
    const name = labelled ? matrix.rows[r] : matrix.rows[r].replace(/^rank /, "");
    pen.fillText(shorten(pen, name, left - 8), 0, top + tall * (r + 0.5) + (labelled ? 0 : 4));
  }
  const marks = Math.max(1, Math.min(columns, Math.floor(width / 130)));
  for (let m = 0; m < marks && columns; m++) {
    const c = Math.floor((m * columns) / marks); // a mark stands where its column begins
    pen.fillText(Format.clock(matrix.seconds[c]), left + cell * c, top + tall * rows + 15);
  }
  pen.textAlign = "left";
  if (at.current) {
    pen.strokeStyle = Tutti.css(Tutti.color("text"));
    pen.lineWidth = 2;
    pen.strokeRect(left + cell * at.current[1] - 1, top + tall * at.current[0] - 1, Math.max(4, cell + 2), Math.max(4, tall + 2));
  }
}

function shorten(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  while (text.length > 1 && pen.measureText(text + "…").width > room) text = text.slice(0, -1);
  return text + "…";
}

// What the colours mean.
function Scale({ range, text }) {
  const canvas = useRef(null);
  const theme = useTheme();
  useLayoutEffect(() => {
    const pen = canvas.current.getContext("2d");
    const ramp = Format.ramp();
    for (let i = 0; i < 256; i++) {
      pen.fillStyle = `rgb(${ramp[3 * i]} ${ramp[3 * i + 1]} ${ramp[3 * i + 2]})`;
      pen.fillRect(i, 0, 1, 12);
    }
  }, [theme]);
  return html`<p class="scale"><span>${text(range[0])}</span><canvas ref=${canvas} width="256" height="12" aria-hidden="true"></canvas><span>${text(range[1])}</span></p>`;
}
