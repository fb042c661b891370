// Draw every part; leave a mark that it was done, which tests wait for.
(async () => {
  const root = document.documentElement;
  try {
    const values = JSON.parse(document.getElementById("values").textContent);
    await Tutti.load(values.arrays, document.getElementById("arrays").textContent.trim());
    const redraw = [];
    for (const [name, data] of Object.entries(values.parts)) {
      redraw.push(Tutti.parts[data.part || name](document.getElementById(name), data));
    }
    const all = () => redraw.forEach((draw) => draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
    matchMedia("print").addEventListener("change", all);
    new ResizeObserver(all).observe(document.body);
    all();
    root.dataset.drawn = Object.keys(values.parts).join(" ");
  } catch (error) {
    root.dataset.failed = String(error);
    console.error(error);
  }
})();
