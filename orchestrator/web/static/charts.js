// The curves: panels with a common axis that zoom together, redrawn with each observation.
"use strict";
(() => {
  const HEIGHT = 150, SPARSE = "held_out";
  const PANELS = [
    { name: "reward", lines: [["reward", "--blue", "a step"], [SPARSE, "--orange", "held out"]] },
    { name: "KL", lines: [["kl", "--violet", "a step"]], limit: true },
    { name: "loss", lines: [["loss", "--green", "a step"]] },
    { name: "seconds of a step", optional: true, lines: [["generate_s", "--blue", "generate"], ["train_s", "--green", "train"], ["sync_s", "--ochre", "sync"]] },
    { name: "idle seconds", optional: true, lines: [["trainer_idle_s", "--green", "trainer"], ["fleet_idle_s", "--blue", "fleet"]] },
    { name: "staleness", optional: true, lines: [["staleness", "--orange", "steps"]] },
  ];
  const box = document.getElementById("charts"), toggle = document.getElementById("axis"), where = document.getElementById("where");
  let axis = "step", drawn = null, range = null, panels = [], plots = [], data = null, requests = 0;
  // An optional panel is drawn if it has a value.
  const filled = () => PANELS.filter((panel) => !panel.optional || panel.lines.some(([name]) => data.present[name].some((v) => v != null)));
  const number = (v) => v == null ? "–" : Math.abs(v) >= 1000 ? v.toFixed(0) : String(+v.toPrecision(3));

  // The maximum distance of two neighbours of a curve; beyond that the line has a gap.
  const gapLimit = (xs) => {
    const apart = xs.slice(1).map((x, i) => x - xs[i]).sort((a, b) => a - b);
    return apart.length ? 4 * apart[apart.length >> 1] : 0;
  };
  // A common x for current and abandoned values; undefined where only the other line has a point, so the line continues.
  const merged = (panel) => {
    const xs = [...new Set([...data.present.x, ...data.abandoned.x])].sort((a, b) => a - b);
    const indexOf = new Map(xs.map((x, i) => [x, i]));
    const column = (part, name) => {
      const out = new Array(xs.length).fill(null);
      const own = data[part].x, limit = gapLimit(own);
      own.forEach((x, i) => {
        if (i && x - own[i - 1] <= limit) out.fill(undefined, indexOf.get(own[i - 1]) + 1, indexOf.get(x));
        out[indexOf.get(x)] = data[part][name][i];
      });
      return out;
    };
    const columns = [xs, column("abandoned", panel.lines[0][0])];
    for (const [name] of panel.lines)
      for (const end of ["", "_low", "_high"]) columns.push(column("present", name + end));
    return columns;
  };
  const marks = (panel) => (u) => {
    const { ctx, bbox } = u, limit = data.kl_limit;
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
    ctx.strokeStyle = colourOf("--lost"); ctx.globalAlpha = .45; ctx.lineWidth = 1;
    for (const fault of panel === PANELS[0] ? data.faults : []) {
      const x = Math.round(u.valToPos(fault[axis], "x", true)) + .5;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + devicePixelRatio * 6); ctx.stroke();
    }
    ctx.globalAlpha = 1;
    if (panel.limit && limit != null) {
      const y = Math.round(u.valToPos(limit, "y", true)) + .5;
      ctx.strokeStyle = colourOf("--red"); ctx.setLineDash([6, 4]);
      ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
    }
    ctx.restore();
  };
  const shades = (u) => {
    if (axis !== "step") return;
    const { ctx, bbox } = u;
    ctx.save(); ctx.fillStyle = colourOf("--shade");
    for (const timeline of data.timelines) {
      const a = Math.max(bbox.left, u.valToPos(timeline.start_step, "x", true));
      const b = Math.min(bbox.left + bbox.width, u.valToPos(timeline.from_step, "x", true));
      if (b > a) ctx.fillRect(a, bbox.top, b - a, bbox.height);
    }
    ctx.restore();
  };
  // The heading of a panel: its values at the cursor, or the newest. Lines without data are hidden.
  const heading = (panel) => {
    const head = document.createElement("p"), values = new Map();
    head.className = "head";
    head.append(Object.assign(document.createElement("b"), { textContent: panel.name }));
    for (const [name, stroke, label] of [...panel.lines, ["abandoned", "--grey", "abandoned"]]) {
      const line = document.createElement("span"), key = document.createElement("i"), value = document.createElement("span");
      line.className = "line";
      key.style.setProperty("--key", `var(${stroke})`);
      values.set(name, value);
      line.append(key, `${label ?? name} `, value);
      head.append(line);
    }
    return { head, values };
  };
  // The last value up to the cursor: current and abandoned lines seldom share an x, and evaluations are rare.
  const valueAt = (u, column, sparse) => {
    const values = u.data[column], at = u.cursor.idx, from = at ?? values.length - 1;
    const least = at == null || sparse ? 0 : from - 3;
    let i = from;
    while (i > 0 && i > least && values[i] == null) i--;
    return number(values[i]);
  };
  const showValues = (panel, values) => (u) => {
    panel.lines.forEach(([name], i) => { values.get(name).textContent = valueAt(u, 2 + 3 * i, name === SPARSE); });
    values.get("abandoned").textContent = u.cursor.idx == null ? "" : valueAt(u, 1, false);
    const x = u.cursor.idx == null ? null : u.data[0][u.cursor.idx];
    where.textContent = x == null ? "drag to zoom, double-click to reset" : position(x) + faultNear(u);
  };
  const hideEmpty = (panel, values) => (u) => {
    const columns = [["abandoned", 1], ...panel.lines.map(([name], i) => [name, 2 + 3 * i])];
    for (const [name, column] of columns) values.get(name).parentElement.hidden = u.data[column].every((value) => value == null);
  };
  const position = (x) => axis === "step" ? `step ${Math.round(x).toLocaleString("en")}` : new Date(x * 1000).toLocaleString();
  const faultNear = (u) => {
    const distance = (fault) => Math.abs(u.valToPos(fault[axis], "x") - u.cursor.left);
    const nearest = data.faults.reduce((best, fault) => !best || distance(fault) < distance(best) ? fault : best, null);
    return nearest && distance(nearest) < 5 ? ` · ${nearest.name}, ${number(nearest.seconds_lost)} s lost` : "";
  };
  const below = (last) => {
    const own = axis === "time" ? timeAxis : stepAxis;
    return last ? own : { ...own, values: () => [] };
  };
  const options = (panel, values, last) => {
    const hidden = { points: { show: false } };
    const series = [{}, { stroke: colourOf("--grey"), width: 1, ...hidden }], bands = [];
    for (const [name, stroke] of panel.lines) {
      const at = series.length, sparse = name === SPARSE;
      series.push({ stroke: colourOf(stroke), width: 1.5, spanGaps: sparse, points: { show: sparse, size: 4, fill: colourOf(stroke) } });
      for (const _ of ["low", "high"]) series.push({ stroke: colourOf(stroke), width: 0, ...hidden });
      if (!sparse) bands.push({ series: [at + 2, at + 1], fill: colourOf(stroke) + "33" });
    }
    const line = axisStyle();
    return {
      width: box.clientWidth, height: last ? HEIGHT + 18 : HEIGHT, series, bands, legend: { show: false }, padding: [4, 10, 0, 0],
      scales: { x: { time: axis === "time", ...(axis === "time" ? { range: () => [data.from_s, data.until_s] } : {}) } },
      cursor: { sync: { key: "run" }, drag: { x: true, y: false, setScale: false }, points: { size: (u, i) => series[i].width ? 5 : 0 } },
      axes: [{ ...line, size: last ? 26 : 8, ...below(last) }, { ...line, size: 70, values: (u, vs) => vs.map(number) }],
      hooks: {
        drawClear: [shades], draw: [marks(panel)], setCursor: [showValues(panel, values)], ready: [hideEmpty(panel, values), showValues(panel, values)],
        setData: [hideEmpty(panel, values), showValues(panel, values)],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          load();
        }],
      },
    };
  };
  const publish = () => {
    box.dataset.points = String(data.present.x.length);
    box.dataset.from = String(data.present.x[0] ?? "");
    box.dataset.to = String(data.present.x.at(-1) ?? "");
  };
  const draw = () => {
    plots.forEach((plot) => plot.destroy());
    plots = [];
    box.replaceChildren();
    const isEmpty = !data.present.x.length && !data.abandoned.x.length;
    box.classList.toggle("empty", isEmpty);
    if (isEmpty) {
      box.append(Object.assign(document.createElement("p"), { className: "none", textContent: range ? "no step ended here" : "no step has ended yet" }));
      drawn = null;
      return publish();
    }
    panels = filled();
    plots = panels.map((panel, i) => {
      const { head, values } = heading(panel);
      box.append(head);
      return new uPlot(options(panel, values, i === panels.length - 1), merged(panel), box);
    });
    drawn = axis;
    publish();
  };
  const refresh = () => {
    if (drawn !== axis || !data.present.x.length || filled().length !== panels.length) return draw();
    plots.forEach((plot, i) => plot.setData(merged(panels[i])));
    publish();
  };
  const load = async () => {
    document.body.dispatchEvent(new CustomEvent("window", { detail: { axis, range } }));
    const mine = ++requests;
    const query = new URLSearchParams({ x: axis, points: String(Math.max(100, Math.min(2000, box.clientWidth))) });
    if (range) { query.set("from", String(range[0])); query.set("to", String(range[1])); }
    const answer = await fetch("/series?" + query);
    if (!answer.ok) return;
    const found = await answer.json();
    if (mine !== requests) return;  // a newer request was sent
    data = found;
    refresh();
  };
  box.addEventListener("dblclick", () => { range = null; load(); });
  const setAxis = (to) => {
    axis = to;
    toggle.textContent = axis === "step" ? "by time" : "by step";
  };
  toggle.addEventListener("click", (event) => {
    event.preventDefault();
    setAxis(axis === "step" ? "time" : "step");
    range = null; load();
  });
  // Zooms in the charts below also apply here: machines zoom in time, step times on the axis of the curves.
  document.body.addEventListener("zoom", (event) => {
    event.preventDefault();
    if (event.detail.range) setAxis(event.detail.axis);
    ({ range } = event.detail); load();
  });
  document.body.addEventListener("observation", load);
  window.addEventListener("resize", () => { if (data) draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (data) draw(); });
  load();
})();
