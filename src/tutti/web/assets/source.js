// Where documents come from: the server, as they change, or the file that this page is.
const Source = (() => {
  const block = document.getElementById("saved");
  const saved = block ? JSON.parse(block.textContent) : null;
  const words = (query) => {
    const found = Object.entries(query).filter(([, value]) => value).sort(([a], [b]) => (a < b ? -1 : 1));
    const text = new URLSearchParams(found).toString();
    return text ? "?" + text : "";
  };
  const address = (view, run) => (view === "runs" ? "runs" : `${view}/${run}`);

  // Hand every new document of a view to `take`; returns how to stop. `follow`: as it changes.
  function watch(view, run, query, follow, take, say) {
    const key = address(view, run) + (view === "runs" ? "" : words(query));
    if (saved) {
      const found = saved.documents[key] || saved.documents[address(view, run)];
      take(found || { missing: "this view is not in the saved file" });
      return () => {};
    }
    if (!follow) {
      let wanted = true;
      fetch("api/" + key)
        .then((answer) => answer.json())
        .then((found) => wanted && take(found))
        .catch(() => wanted && say(false));
      return () => (wanted = false);
    }
    const events = new EventSource("live/" + key);
    events.onmessage = (event) => {
      say(true);
      take(JSON.parse(event.data));
    };
    events.onopen = () => say(true);
    events.onerror = () => say(false);
    return () => events.close();
  }

  return { watch, words, saved, save: (view, run, query) => "save/" + address(view, run) + words(query) };
})();
