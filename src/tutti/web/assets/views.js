// The views. Each is drawn from one document; whatever a document says is shown as text.
const COLORS = Array.from({ length: 8 }, (_, i) => `series-${i + 1}`);
const PARTS = { compute: "forward", communication: "exposed", bubble: "bubble", copy: "copies", data: "fetch", other: "norm" };
const Tile = ({ name, value, note, alarm }) => html`<div class=${"tile" + (alarm ? " alarm" : "")}><dt>${name}</dt><dd>${value}<small>${note}</small></dd></div>`;
const Notes = ({ notes }) => (notes && notes.length ? html`<ul class="caveats">${notes.map((note) => html`<li>${note}</li>`)}</ul>` : null);
const Missing = ({ why }) => html`<p class="nothing">${why}</p>`;

function State({ state }) {
  return html`<span class=${"state " + (state === "alive" ? "on" : "")}>${state}</span>`;
}

// --- runs beside each other --------------------------------------------------------------------

function RunsView({ found }) {
  const runs = found.runs;
  const head = ["run", "", "model", "cluster", "ranks", "steps", "loss", "step", "forecast", "measured ÷ forecast", "tokens/s", "MFU", "effective time", "generations"];
  return html`<section><h2>Runs</h2>
    <div class="table cards"><table><thead><tr>${head.map((name, i) => html`<th scope="col" class=${i > 3 ? "figure" : ""}>${name}</th>`)}</tr></thead>
    <tbody>${runs.map((run, i) => html`<tr>
      <td><a href=${`#/run/${i}/run`}>${run.name}</a></td><td><${State} state=${run.state} /></td>
      <td data-name="model">${run.model}</td><td data-name="cluster">${run.cluster}</td>
      ${[["ranks", run.ranks || "–"], ["steps", run.steps ?? "–"], ["loss", Format.number(run.loss)], ["step", Format.seconds(run.seconds)], ["forecast", Format.seconds(run.predicted_s)],
        ["measured ÷ forecast", run.predicted_s && run.seconds ? (run.seconds / run.predicted_s).toFixed(3) : "–"],
        ["tokens/s", Format.count(run.tokens_per_s)], ["MFU", Format.percent(run.mfu)], ["effective time", Format.percent(run.effective)], ["generations", run.generations || "–"]].map(([name, value]) => html`<td class="figure" data-name=${name}>${value}</td>`)}
    </tr>`)}</tbody></table></div></section>
    <section class="charts">${[["Loss", "loss", (v) => Format.number(v)], ["Tokens per second", "tokens_per_s", Format.count], ["MFU", "mfu", Format.percent]].map(
      ([title, name, text], k) => html`<${Compared} title=${title} runs=${runs} figure=${name} text=${text} zero=${k > 0} />`)}</section>`;
}

// Runs have steps of their own: one axis that holds all of them.
function Compared({ title, runs, figure, text, zero }) {
  const steps = [...new Set(runs.flatMap((run) => run.curves.step))].sort((a, b) => a - b);
  if (!steps.length) return null;
  const lines = runs.map((run, i) => {
    const known = new Map(run.curves.step.map((step, k) => [step, run.curves[figure][k]]));
    return { name: run.name, color: COLORS[i % COLORS.length], values: steps.map((step) => known.get(step) ?? null) };
  });
  return html`<${Chart} title=${title} steps=${steps} lines=${lines} text=${text} zero=${zero} />`;
}

// --- one run -----------------------------------------------------------------------------------

function RunView({ found, run }) {
  const { columns } = found;
  const last = (name) => columns[name].at(-1) ?? null;
  const steps = columns.step;
  const losses = [{ name: "loss", color: "series-1", values: columns.loss }];
  if (found.validation.length) {
    const held = new Map(found.validation);
    losses.push({ name: "validation", color: "series-2", values: steps.map((step) => held.get(step) ?? null) });
  }
  const ratio = run.predicted_s && run.seconds ? run.seconds / run.predicted_s : null;
  const marks = found.generations.slice(1).map((one) => ({ at: (one.step ?? 0) + 1, name: `generation ${one.number}` }));
  const backs = found.generations.map((one) => one.back_s).filter((value) => value !== null).sort((a, b) => a - b);
  return html`<dl class="tiles">
      <${Tile} name="Loss" value=${Format.number(last("loss"))} note=${`step ${last("step") ?? "–"}`} />
      <${Tile} name="Throughput" value=${Format.count(run.tokens_per_s)} note="tokens per second, median step" />
      <${Tile} name="MFU" value=${Format.percent(run.mfu)} note="of all chips' dense peak" />
      <${Tile} name="Step" value=${Format.seconds(run.seconds)} note=${`median; forecast ${Format.seconds(run.predicted_s)}`} alarm=${ratio > 1.25} />
      <${Tile} name="Measured ÷ forecast" value=${ratio ? ratio.toFixed(3) : "–"} note="1 is a perfect forecast" />
      <${Tile} name="Effective training time" value=${Format.percent(found.effective)} note="of the time since the first step began" />
      ${found.generations.length > 0 && html`<${Tile} name="Generations" value=${found.generations.length} note=${`training again after ${backs.length ? Format.seconds(backs[backs.length >> 1]) : "–"} (median); ${found.repeated} steps made again`} />`}
      ${found.overrun > 0 && html`<${Tile} name="Overrun" value=${Format.percent(found.overrun)} note="host behind the emulated chips; times count up to 5 %" alarm=${found.overrun > 0.05} />`}
    </dl><${Notes} notes=${found.notes} />
    ${steps.length ? html`<section class="charts">
      <${Chart} title="Loss" steps=${steps} marks=${marks} lines=${losses} text=${(v) => Format.number(v)} />
      <${Chart} title="Step: measured beside forecast" steps=${steps} marks=${marks} text=${Format.seconds} zero=${true}
        lines=${[{ name: "measured", color: "series-1", values: columns.seconds }, { name: "forecast", color: "alarm", values: columns.predicted_s, dash: true }]} />
      <${Chart} title="Tokens per second" steps=${steps} marks=${marks} text=${Format.count} zero=${true} lines=${[{ name: "tokens/s", color: "series-3", values: columns.tokens_per_s }]} />
      <${Chart} title="MFU" steps=${steps} marks=${marks} text=${Format.percent} zero=${true} lines=${[{ name: "MFU", color: "series-4", values: columns.mfu }]} />
    </section>` : html`<${Missing} why="no step has ended yet" />`}
    ${found.pools.length > 0 && html`<${Pools} pools=${found.pools} />`}
    ${found.generations.length > 0 && html`<${Generations} found=${found} />`}
    ${found.decisions.length > 0 && html`<${Decisions} decisions=${found.decisions} />`}`;
}

function Pools({ pools }) {
  const whole = Math.max(...pools.map(({ parts }) => Object.values(parts).reduce((a, b) => a + b, 0)));
  return html`<section><h2>Where the step goes</h2><p class="intro">A mean rank of each pool, over the last 20 steps.</p>
    <ul class="legend">${Object.entries(PARTS).map(([name, color]) => html`<li><i class=${"key-" + color}></i>${name}</li>`)}</ul>
    <div class="bars">${pools.map(({ pool, ranks, parts }) => html`<div class="row"><span class="label">${pool}<small>${ranks} ranks</small></span>
      <span class="bar" role="img" aria-label=${Object.entries(parts).map(([name, value]) => `${name} ${Format.seconds(value)}`).join(", ")}>${Object.entries(parts).map(([name, value]) => html`<span class=${"key-" + PARTS[name]} style=${{ width: `${(100 * value) / whole}%` }} title=${`${name} ${Format.seconds(value)}`}></span>`)}</span>
      <span class="note">${Format.seconds(Object.values(parts).reduce((a, b) => a + b, 0))}</span></div>`)}</div></section>`;
}

// --- figures of chips, ranks, links ------------------------------------------------------------

function FigureChoice({ figures, value, change }) {
  return html`<label>Figure <select value=${value} onChange=${(event) => change({ figure: event.target.value })}>
    ${figures.map((name) => html`<option value=${name}>${Format.name(name)}</option>`)}</select></label>`;
}

function MapView({ found, change }) {
  return html`<div class="controls"><${FigureChoice} figures=${found.figures} value=${found.figure} change=${change} />
      <span class="hint">${found.means} · ${found.at ? Format.time(found.at) : "no value yet"}</span></div>
    <${Notes} notes=${found.notes} /><${ClusterMap} found=${found} />`;
}

function HeatView({ found, query, change, matrix, version }) {
  const relative = query.scale === "relative";
  const spans = [[300, "5 minutes"], [1800, "half an hour"], [7200, "2 hours"], [86400, "a day"]];
  return html`<div class="controls"><${FigureChoice} figures=${found.figures} value=${found.figure} change=${change} />
      <label>Span <select value=${String(found.span)} onChange=${(event) => change({ span: event.target.value })}>${spans.map(([value, name]) => html`<option value=${value}>${name}</option>`)}</select></label>
      <label>Colour <select value=${relative ? "relative" : ""} onChange=${(event) => change({ scale: event.target.value })}>
        <option value="">value</option><option value="relative">against the median of the moment</option></select></label>
      <span class="hint">${found.means}${found.every_s > 1 ? ` · means of ${found.every_s} s` : ""}</span></div>
    <${Notes} notes=${found.left_out ? [...found.notes, `${found.left_out} further rows are not drawn`] : found.notes} />
    ${matrix && matrix.columns.length ? html`<${Heat} matrix=${matrix} rate=${found.rate} relative=${relative} version=${version} />` : html`<${Missing} why="no values in this span" />`}`;
}

// --- a real step over the simulated one --------------------------------------------------------

function StepView({ found, change }) {
  const choose = (event) => change({ step: event.target.value, at: String(Date.now()) });
  return html`<dl class="tiles">
      <${Tile} name="Simulated" value=${Format.seconds(found.simulated_s)} note="the whole step" />
      <${Tile} name="Real" value=${Format.seconds(found.real_s)} note=${`step ${found.step}, from ${found.source}`} />
      <${Tile} name="Real ÷ simulated" value=${(found.real_s / found.simulated_s).toFixed(3)} note="1 is a perfect prediction" /></dl>
    <div class="controls"><label>Step <select value=${found.source === "rings" ? "" : String(found.step)} onChange=${choose}>
      <option value="">newest (from the ranks' rings)</option>${found.traced.map((step) => html`<option value=${step}>${step} (traced)</option>`)}</select></label>
      ${!Source.saved && html`<button type="button" onClick=${() => change({ step: "", at: String(Date.now()) })}>Newest step</button>`}</div>
    <p class="intro">${found.intro}</p><${Timeline} found=${found} />`;
}

// --- alerts, the doctor, logs ------------------------------------------------------------------

function AlertsView({ found, link }) {
  return html`<${Notes} notes=${found.notes} />${found.alerts.length ? html`<div class="table long cards"><table>
    <thead><tr>${["begin", "end", "component", "what", "remedy", ""].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
    <tbody>${found.alerts.map((one) => html`<tr><td>${Format.time(one.begin)}</td><td data-name="end">${one.end ? Format.time(one.end) : "still"}</td><td data-name="component">${one.component}</td>
      <td class="prose">${one.words}</td><td class="prose">${one.remedy}</td>
      <td>${one.figure && html`<a href=${link("heat", { figure: one.figure, until: String((one.end || one.begin) + 60) })}>figure</a>`} <a href=${link("logs", { at: String(one.begin) })}>logs</a></td></tr>`)}</tbody></table></div>`
    : html`<${Missing} why="no rule about steps or hosts' figures was met" />`}`;
}

function DoctorView({ found, link }) {
  const one = found.finding;
  const rows = [["cause", one.cause], ["where", found.where], ["confidence", one.confidence ? Format.percent(one.confidence) : ""], ["remedy", one.remedy],
    ...one.alternatives.map((other) => ["or", `${other.component}: ${other.cause} (${Format.percent(other.confidence)})`]),
    ...one.next_steps.map((step) => ["next", step]), ...one.notes.map((note) => ["note", note])].filter(([, value]) => value);
  const place = (evidence) => {
    const log = /\/(logs\/.+)$/.exec(evidence.file);
    const text = evidence.line ? `${evidence.file}:${evidence.line}` : evidence.file;
    return log ? html`<a href=${link("logs", { file: log[1], line: String(evidence.line) })}>${text}</a>` : text;
  };
  return html`<section><h2 class=${one.healthy ? "" : "found"}>${one.healthy ? "healthy" : one.component}</h2>
    <dl class="facts">${rows.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl></section>
    ${one.evidence.length > 0 && html`<section><h2>Evidence</h2>${one.evidence.map((evidence) => html`<figure class="evidence"><figcaption>${place(evidence)}${evidence.host ? ` · ${evidence.host}` : ""}${evidence.rank !== null ? ` · rank ${evidence.rank}` : ""}</figcaption><pre>${evidence.text}</pre></figure>`)}</section>`}`;
}

function LogsView({ found, change }) {
  const marked = useRef(null);
  useEffect(() => {
    if (marked.current) marked.current.scrollIntoView({ block: "center" });
  }, [found.file, found.line]);
  return html`<div class="controls"><label>File <select value=${found.file} onChange=${(event) => change({ file: event.target.value, line: "", at: "" })}>
      ${found.files.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
      <label>Line <input type="number" min="1" max=${found.of} value=${found.line || ""} onChange=${(event) => change({ file: found.file, line: event.target.value, at: "" })} /></label>
      <span class="hint">${found.of} lines</span></div>
    <${Notes} notes=${found.note ? [found.note] : []} />
    <div class="log" tabindex="0" role="region" aria-label=${found.file}><table><tbody>${found.lines.map(([number, text]) => html`<tr class=${number === found.line ? "here" : ""} ref=${number === found.line ? marked : null}>
      <td>${number}</td><td>${text}</td></tr>`)}</tbody></table></div>`;
}
