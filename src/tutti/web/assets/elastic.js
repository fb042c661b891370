// Generations of an elastic run: what it did when, who took part and how each ended, every decision.
const PHASES = { running: "step", entering: "fetch", leaving: "alarm", settling: "caution", waiting: "bubble" };
const SAID = { running: "trains", entering: "state travels", leaving: "ranks leave", settling: "the next is chosen", waiting: "waits for chips" };

function Generations({ found }) {
  const ended = (one) => (one.alive ? "runs" : one.why) + (one.over && one.over !== "finished" ? ` (${one.over})` : "");
  const chips = (one) => [one.lost && `− ${one.lost}`, one.gained && `+ ${one.gained}`].filter(Boolean).join("; ");
  const head = ["generation", "began", "from", "ranks", "chips that changed", "back after", "trained", "plan", "ended because"];
  const figures = new Set(["generation", "ranks", "back after", "trained"]);
  return html`<section><h2>Generations</h2><${Phases} spans=${found.phases} />
    <div class="table long cards"><table><thead><tr>${head.map((name) => html`<th scope="col" class=${figures.has(name) ? "figure" : ""}>${name}</th>`)}</tr></thead>
    <tbody>${found.generations.toReversed().map((one) => html`<tr><td class="figure" data-name="generation">${one.number}</td><td class="time" data-name="began">${Format.time(one.entered)}</td>
      <td class="prose" data-name="from">${one.source}</td><td class="figure" data-name="ranks">${one.ranks || "–"}</td>
      <td class="prose" data-name="chips that changed">${chips(one) || "–"}</td><td class="figure" data-name="back after">${Format.seconds(one.back_s)}</td>
      <td class="figure" data-name="trained">${one.trained_s === null ? "never" : Format.seconds(one.trained_s)}</td><td class="time" data-name="plan">${one.plan || "–"}</td><td class="prose" data-name="ended because">${ended(one)}</td></tr>`)}</tbody></table></div></section>`;
}

// What the job did from its first decision on, on one line of time.
function Phases({ spans }) {
  if (!spans.length) return null;
  const [first, last] = [spans[0].begin, spans.at(-1).end];
  const whole = Math.max(1e-9, last - first);
  const share = spans.filter((one) => one.phase === "running").reduce((sum, one) => sum + one.end - one.begin, 0) / whole;
  const say = (one) => `generation ${one.generation} ${SAID[one.phase] || one.phase} for ${Format.seconds(one.end - one.begin)} from ${Format.clock(one.begin)}`;
  const at = useRef(-1);
  const show = (event, number) => {
    at.current = number;
    const frame = event.currentTarget.getBoundingClientRect();
    const middle = (spans[number].begin + spans[number].end) / 2;
    Tutti.tip({ clientX: frame.left + (frame.width * (middle - first)) / whole, clientY: frame.bottom }, `generation ${spans[number].generation}`, [say(spans[number])]);
  };
  const keys = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    show(event, Math.max(0, Math.min(spans.length - 1, at.current < 0 && step < 0 ? spans.length - 1 : at.current + step)));
  };
  const hover = (event) => {
    const frame = event.currentTarget.getBoundingClientRect();
    const moment = first + (whole * (event.clientX - frame.left)) / frame.width;
    const number = spans.findIndex((one) => moment >= one.begin && moment < one.end);
    if (number >= 0) show(event, number);
  };
  const leave = (event) => Tutti.tip(event, "");
  return html`<ul class="legend">${Object.entries(PHASES).filter(([name]) => spans.some((one) => one.phase === name)).map(([name, color]) => html`<li><i class=${"key-" + color}></i>${SAID[name]}</li>`)}</ul>
    <div class="phases" tabindex="0" role="img" onKeyDown=${keys} onPointerMove=${hover} onPointerLeave=${leave} onBlur=${leave}
      aria-label=${`${Format.percent(share)} of ${Format.seconds(whole)} in generations that train. Arrow keys walk from phase to phase.`}>
      ${spans.map((one) => html`<span class=${"key-" + (PHASES[one.phase] || "bubble")} style=${{ width: `${(100 * (one.end - one.begin)) / whole}%` }}></span>`)}</div>
    <p class="scale"><span>${Format.time(first)}</span><span>${Format.percent(share)} of ${Format.seconds(whole)} in generations that train</span><span>${Format.time(last)}</span></p>`;
}

function Decisions({ decisions }) {
  return html`<section><h2>Decisions</h2><div class="table long"><table>
    <thead><tr>${["time", "generation", "phase", "step", "ranks", "why"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
    <tbody>${decisions.toReversed().map((one) => html`<tr><td>${Format.time(one.at)}</td><td>${one.generation}</td><td>${one.phase}</td><td>${one.step ?? ""}</td><td>${one.ranks || ""}</td><td class="prose">${one.why}</td></tr>`)}</tbody></table></div></section>`;
}
