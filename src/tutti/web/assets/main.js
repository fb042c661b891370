// The page: addresses (#/runs, #/run/0/map?figure=…), which views follow what happens, keys.
const VIEWS = [["run", "Run"], ["map", "Map"], ["heat", "Heat"], ["step", "Step"], ["alerts", "Alerts"], ["doctor", "Doctor"], ["logs", "Logs"]];
const FOLLOWED = new Set(["runs", "run", "map", "heat", "alerts", "doctor"]);

function parse(hash) {
  const [path, words] = hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/");
  const query = Object.fromEntries(new URLSearchParams(words || ""));
  if (parts[0] !== "run") return { view: "runs", run: 0, query: {} };
  const view = VIEWS.some(([name]) => name === parts[2]) ? parts[2] : "run";
  return { view, run: Number.parseInt(parts[1], 10) || 0, query };
}

const link = (run) => (view, query = {}) => `#/run/${run}/${view}${Source.words(query)}`;

// A document as it changes; a heat map also as the matrix that its columns were added to.
function useDocument({ view, run, query }) {
  const [found, set] = useState(null);
  const [answers, say] = useState(true);
  const held = useRef({ matrix: null, version: 0 });
  const key = view + run + Source.words(query);
  useEffect(() => {
    set(null);
    held.current = { matrix: null, version: 0 };
    const asked = { ...query };
    delete asked.scale; // how it is drawn, not what
    const take = (document_) => {
      const { current } = held;
      if (view === "heat" && !document_.missing) {
        if (document_.more && current.matrix && current.matrix.fits(document_)) current.matrix.add(document_, document_.span);
        else if (!document_.more || document_.seconds.length) current.matrix = new Matrix(document_);
        current.version++;
      }
      set({ key, document: document_, ...current });
    };
    return Source.watch(view, run, asked, FOLLOWED.has(view) && !query.until, take, say);
  }, [key]);
  return [found && found.key === key ? found : null, answers];
}

function App() {
  const [at, go] = useState(parse(location.hash || (Source.saved ? Source.saved.start : "#/runs")));
  const [runs, setRuns] = useState(null);
  const [found, answers] = useDocument(at);
  useEffect(() => {
    const heard = () => go(parse(location.hash));
    addEventListener("hashchange", heard);
    return () => removeEventListener("hashchange", heard);
  }, []);
  useEffect(() => Source.watch("runs", 0, {}, true, setRuns, () => {}), []);
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey || /^(input|select|textarea)$/i.test(event.target.tagName)) return;
      if (event.key === "0") location.hash = "#/runs";
      const chosen = VIEWS[Number(event.key) - 1];
      if (chosen) location.hash = link(at.run)(chosen[0]);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [at.run]);
  const list = runs ? runs.runs : [];
  const known = list[at.run];
  const change = (query) => (location.hash = link(at.run)(at.view, { ...at.query, ...query }));
  useEffect(() => {
    document.title = at.view === "runs" ? "Runs" : `${known ? known.name : ""}: ${at.view}`;
    if (found && runs) document.documentElement.dataset.drawn = at.view;
  });
  return html`<header class="bar-top"><h1><a href="#/runs">tutti</a></h1>
      <nav aria-label="Runs"><select aria-label="Run" value=${at.view === "runs" ? "" : String(at.run)} onChange=${(event) => (location.hash = event.target.value === "" ? "#/runs" : link(event.target.value)(at.view === "runs" ? "run" : at.view))}>
        <option value="">all runs</option>${list.map((run, i) => html`<option value=${String(i)}>${run.name}</option>`)}</select></nav>
      <nav aria-label="Views">${at.view !== "runs" && VIEWS.map(([view, name], i) => html`<a href=${link(at.run)(view)} aria-current=${view === at.view ? "page" : null} title=${`key ${i + 1}`}>${name}</a>`)}</nav>
      <span class="right">${known && at.view !== "runs" && html`<${State} state=${known.state} />`}
        ${!answers && html`<span class="state off">the dashboard does not answer</span>`}
        ${Source.saved ? html`<span class="state">saved ${Format.time(Source.saved.at)}</span>` : html`<a class="button" href=${Source.save(at.view, at.run, at.query)} download>Save as a file</a>`}</span></header>
    <main>${runs && (found || (at.view !== "runs" && !known)) ? draw(at, found, known, change) : html`<p class="nothing" role="status">reading …</p>`}</main>`;
}

function draw(at, found, run, change) {
  if (at.view !== "runs" && !run) return html`<${Missing} why="no such run" />`;
  const document_ = found.document;
  if (document_.missing) return html`<${Missing} why=${document_.missing} />`;
  const parts = { run: RunView, map: MapView, heat: HeatView, step: StepView, alerts: AlertsView, doctor: DoctorView, logs: LogsView };
  const View = parts[at.view] || RunsView;
  return html`<${View} found=${document_} run=${run} query=${at.query} change=${change} link=${link(at.run)} matrix=${found.matrix} version=${found.version} />`;
}

render(html`<${App} />`, document.getElementById("app"));
