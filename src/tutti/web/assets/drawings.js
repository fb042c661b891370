// The cluster map and the timeline, drawn by the scripts of the static pages inside a live one.
let packs = 0;

// Arrays of a document under names of their own, so that two drawings do not mix them up.
async function unpackArrays(found) {
  const prefix = `${++packs}.`;
  const directory = Object.fromEntries(Object.entries(found.arrays).map(([name, where]) => [prefix + name, where]));
  await Tutti.load(directory, found.packed);
  const renamed = (value) => (typeof value === "string" && value in found.arrays ? prefix + value : value);
  const data = Object.fromEntries(Object.entries(found.data).map(([name, value]) => [name, renamed(value)]));
  const drop = () => Object.keys(directory).forEach((name) => delete Tutti.arrays[name]);
  return [data, renamed, drop];
}

function ClusterMap({ found }) {
  const box = useRef(null);
  const drawn = useRef(null);
  const theme = useTheme();
  const shape = found.packed + found.figure;
  const now = useRef(null);
  now.current = found;

  useEffect(() => {
    let [gone, drop, stop] = [false, () => {}, () => {}];
    unpackArrays(found).then(([data, renamed, dropArrays]) => {
      drop = dropArrays;
      if (gone) return drop();
      const figure = found.data.pools.map((pool, i) => {
        const caption = document.createElement("figcaption");
        const name = document.createElement("b");
        name.textContent = pool.name;
        caption.append(name, " ", found.captions[i]);
        const canvas = document.createElement("canvas");
        canvas.tabIndex = 0;
        canvas.setAttribute("role", "img");
        const part = document.createElement("figure");
        part.className = "pool";
        part.append(caption, canvas);
        return part;
      });
      const list = document.createElement("div");
      list.className = "pools";
      list.append(...figure);
      box.current.replaceChildren(list);
      const pools = found.data.pools.map((pool) => ({ ...pool, owner: renamed(pool.owner), place: renamed(pool.place) }));
      const colours = shades(now);
      drawn.current = Tutti.parts.cluster(box.current, { ...data, pools, paint: colours.paint, tell: colours.tell });
      drawn.current();
      stop = onWidth(box.current, () => drawn.current && drawn.current());
    });
    return () => {
      gone = true;
      stop();
      drawn.current = null;
      drop();
    };
  }, [shape]);
  useEffect(() => drawn.current && drawn.current());
  const values = found.values.flatMap((text) => [...Format.unpack(text)]);
  const rate = /_total$/.test(found.figure);
  return html`<div ref=${box} class="map" key=${theme}></div>
    <${Scale} range=${Format.range(values)} text=${(value) => Format.figure(found.figure, rate, value)} />`;
}

// Colours and words of chips by the values that the newest document has.
function shades(now) {
  let [seen, values, range, ramp] = [null, [], [0, 1], null];
  const read = () => {
    if (seen === now.current) return;
    seen = now.current;
    values = seen.values.map(Format.unpack);
    range = Format.range(values.flatMap((own) => [...own]));
  };
  return {
    paint(pool, chip) {
      read();
      ramp = chip === 0 || !ramp ? Format.ramp() : ramp;
      const value = values[pool][chip];
      if (!Number.isFinite(value)) return null;
      const at = 3 * Format.shade(value, range);
      const rgb = [ramp[at], ramp[at + 1], ramp[at + 2]];
      return [Tutti.css(rgb), Tutti.ink(rgb)];
    },
    tell(pool, chip) {
      read();
      const value = values[pool][chip];
      return [`${Format.name(seen.figure)}: ${Format.figure(seen.figure, /_total$/.test(seen.figure), value)}`];
    },
  };
}

function Timeline({ found }) {
  const box = useRef(null);
  const theme = useTheme();
  const drawn = useRef(null);
  useEffect(() => {
    let [gone, drop, stop] = [false, () => {}, () => {}];
    unpackArrays(found).then(([data, , dropArrays]) => {
      drop = dropArrays;
      if (gone) return drop();
      box.current.innerHTML = found.body; // controls that the package wrote; names are data only
      drawn.current = Tutti.parts.gantt(box.current, data);
      drawn.current();
      stop = onWidth(box.current, () => drawn.current && drawn.current());
    });
    return () => {
      gone = true;
      stop();
      drawn.current = null;
      drop();
    };
  }, [found.packed]);
  useEffect(() => drawn.current && drawn.current(), [theme]);
  return html`<div ref=${box}></div>`;
}
