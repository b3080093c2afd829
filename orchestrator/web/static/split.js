// Step time: its parts stacked, on the axis of the curves.
"use strict";
(() => {
  const HEIGHT = 150, TIMES = 2.2;  // the axis ends at TIMES the median step, so a step that waited for hours is cut
  const COLOURS = {
    "waiting for nodes": "--red", generating: "--blue", rewards: "--violet", "publishing weights": "--ochre",
    storing: "--orange", training: "--green", restarting: "--grey",
  };
  const box = document.getElementById("split"), info = document.getElementById("split-info");
  let axis = "step", range = null, data = null, plot = null, requests = 0;
  const number = (v) => v == null ? "–" : Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(3));
  const parts = () => Object.keys(COLOURS).filter((name) => data.total_s[name] > 0);

  const most = (sums) => {
    const inOrder = [...sums].sort((a, b) => a - b);
    return Math.min(inOrder.at(-1) ?? 1, TIMES * (inOrder[inOrder.length >> 1] ?? 1)) || 1;
  };
  const showValues = (at) => {
    const whole = Object.values(data.total_s).reduce((a, b) => a + b, 0);
    const line = parts().map((part) => keyed(
      COLOURS[part], part, at == null ? `${(100 * data.total_s[part] / whole).toFixed(1)} %` : `${number(data.seconds[part][at])} s`,
    ));
    const note = Object.assign(document.createElement("span"), { className: "note" });
    if (at == null) note.textContent = data.steps ? `of ${number(whole / data.steps)} s a step` : range ? "no step ended here" : "shown from the second step on";
    else note.textContent = axis === "step" ? `step ${Math.round(data.x[at]).toLocaleString("en")}` : new Date(data.x[at] * 1000).toLocaleString("en-GB");
    info.replaceChildren(...line, note);
  };
  const draw = () => {
    plot?.destroy();
    box.replaceChildren();
    showValues(null);
    box.classList.toggle("empty", !data.x.length);
    if (!data.x.length) return;
    const columns = [data.x, ...stackUp(parts().map((part) => data.seconds[part]))], names = parts().reverse();
    const stepped = uPlot.paths.stepped({ align: -1 });
    const line = axisStyle(), below = axis === "time" ? timeAxis : stepAxis;
    plot = new uPlot({
      width: box.clientWidth, height: HEIGHT + 18, legend: { show: false }, padding: [4, 10, 0, 0],
      series: [{}, ...names.map((part) => ({ fill: colourOf(COLOURS[part]), width: 0, paths: stepped, points: { show: false } }))],
      scales: { x: { time: axis === "time", ...(axis === "time" ? { range: () => [data.from_s, data.until_s] } : {}) }, y: { range: () => [0, most(columns[1]) * 1.05] } },
      cursor: { sync: { key: "run" }, drag: { x: true, y: false, setScale: false }, points: { show: false } },
      axes: [{ ...line, size: 26, ...below }, { ...line, size: 70, values: (u, vs) => vs.map((v) => `${number(v)} s`) }],
      hooks: {
        setCursor: [(u) => showValues(u.cursor.idx)],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          const part = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          zoom(part);
        }],
      },
    }, columns, box);
  };
  const zoom = (part) => document.body.dispatchEvent(new CustomEvent("zoom", { detail: { axis, range: part }, cancelable: true }));
  const load = async () => {
    const mine = ++requests, drawn = axis;
    const query = new URLSearchParams({ x: axis, points: String(Math.max(100, Math.min(600, box.clientWidth >> 1))) });
    if (range) { query.set("from", String(range[0])); query.set("to", String(range[1])); }
    const answer = await fetch("/split?" + query);
    if (!answer.ok || mine !== requests || drawn !== axis) return;
    data = await answer.json();
    draw();
    box.dataset.points = String(data.x.length);
  };
  box.addEventListener("dblclick", () => zoom(null));
  document.body.addEventListener("window", (event) => {
    ({ axis, range } = event.detail);
    load();
  });
  const redraw = () => { if (data) draw(); };
  window.addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  load();
})();
