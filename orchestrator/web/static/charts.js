// The curves: panels over one axis that zoom together, drawn again with each look.
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
  let axis = "step", drawn = null, range = null, panels = [], plots = [], data = null, asked = 0;
  // An optional panel is drawn where it has a value.
  const filled = () => PANELS.filter((one) => !one.optional || one.lines.some(([name]) => data.present[name].some((v) => v != null)));
  const number = (v) => v == null ? "–" : Math.abs(v) >= 1000 ? v.toFixed(0) : String(+v.toPrecision(3));

  // How far apart two neighbours of a curve may be: beyond that the line has a hole.
  const reach = (xs) => {
    const apart = xs.slice(1).map((x, i) => x - xs[i]).sort((a, b) => a - b);
    return apart.length ? 4 * apart[apart.length >> 1] : 0;
  };
  // One x for what is present and what was abandoned. Where the other alone has a point a line goes on: undefined.
  const merged = (panel) => {
    const xs = [...new Set([...data.present.x, ...data.abandoned.x])].sort((a, b) => a - b);
    const place = new Map(xs.map((x, i) => [x, i]));
    const column = (part, name) => {
      const out = new Array(xs.length).fill(null);
      const own = data[part].x, far = reach(own);
      own.forEach((x, i) => {
        if (i && x - own[i - 1] <= far) out.fill(undefined, place.get(own[i - 1]) + 1, place.get(x));
        out[place.get(x)] = data[part][name][i];
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
    for (const one of panel === PANELS[0] ? data.faults : []) {
      const x = Math.round(u.valToPos(one[axis], "x", true)) + .5;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + devicePixelRatio * (4 + 2 * Math.min(4, one.count))); ctx.stroke();
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
    for (const one of data.timelines) {
      const a = Math.max(bbox.left, u.valToPos(one.start_step, "x", true));
      const b = Math.min(bbox.left + bbox.width, u.valToPos(one.from_step, "x", true));
      if (b > a) ctx.fillRect(a, bbox.top, b - a, bbox.height);
    }
    ctx.restore();
  };
  // What stands above a panel: its values under the cursor, or its newest. A line of which there is nothing is not named.
  const heading = (panel) => {
    const head = document.createElement("p"), values = new Map();
    head.className = "head";
    head.append(Object.assign(document.createElement("b"), { textContent: panel.name }));
    for (const [name, stroke, label] of [...panel.lines, ["abandoned", "--grey", "abandoned"]]) {
      const one = document.createElement("span"), key = document.createElement("i"), value = document.createElement("span");
      one.className = "line";
      key.style.setProperty("--key", `var(${stroke})`);
      values.set(name, value);
      one.append(key, `${label ?? name} `, value);
      head.append(one);
    }
    return { head, values };
  };
  // The last value up to the cursor: what is present and what was abandoned seldom share an x, evaluations are rare.
  const under = (u, column, sparse) => {
    const values = u.data[column], at = u.cursor.idx, from = at ?? values.length - 1;
    const least = at == null || sparse ? 0 : from - 3;
    let i = from;
    while (i > 0 && i > least && values[i] == null) i--;
    return number(values[i]);
  };
  const tell = (panel, values) => (u) => {
    panel.lines.forEach(([name], i) => { values.get(name).textContent = under(u, 2 + 3 * i, name === SPARSE); });
    values.get("abandoned").textContent = u.cursor.idx == null ? "" : under(u, 1, false);
    const x = u.cursor.idx == null ? null : u.data[0][u.cursor.idx];
    where.textContent = x == null ? "drag to zoom, double-click for all" : place(x) + near(u);
  };
  const offer = (panel, values) => (u) => {
    const columns = [["abandoned", 1], ...panel.lines.map(([name], i) => [name, 2 + 3 * i])];
    for (const [name, column] of columns) values.get(name).parentElement.hidden = u.data[column].every((value) => value == null);
  };
  const place = (x) => axis === "step" ? `step ${Math.round(x).toLocaleString("en")}` : new Date(x * 1000).toLocaleString();
  const near = (u) => {
    const away = (one) => Math.abs(u.valToPos(one[axis], "x") - u.cursor.left);
    const one = data.faults.reduce((best, other) => !best || away(other) < away(best) ? other : best, null);
    return one && away(one) < 5 ? ` · ${one.name}, ${number(one.seconds_lost)} s lost` : "";
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
        drawClear: [shades], draw: [marks(panel)], setCursor: [tell(panel, values)], ready: [offer(panel, values), tell(panel, values)],
        setData: [offer(panel, values), tell(panel, values)],
        setSelect: [(u) => {
          if (u.select.width < 4) return;
          range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          load();
        }],
      },
    };
  };
  const told = () => {
    box.dataset.points = String(data.present.x.length);
    box.dataset.from = String(data.present.x[0] ?? "");
    box.dataset.to = String(data.present.x.at(-1) ?? "");
  };
  const draw = () => {
    plots.forEach((one) => one.destroy());
    plots = [];
    box.replaceChildren();
    const none = !data.present.x.length && !data.abandoned.x.length;
    box.classList.toggle("empty", none);
    if (none) {
      box.append(Object.assign(document.createElement("p"), { className: "none", textContent: range ? "no step ended here" : "no step has ended yet" }));
      drawn = null;
      return told();
    }
    panels = filled();
    plots = panels.map((panel, i) => {
      const { head, values } = heading(panel);
      box.append(head);
      return new uPlot(options(panel, values, i === panels.length - 1), merged(panel), box);
    });
    drawn = axis;
    told();
  };
  const refresh = () => {
    if (drawn !== axis || !data.present.x.length || filled().length !== panels.length) return draw();
    plots.forEach((one, i) => one.setData(merged(panels[i])));
    told();
  };
  const load = async () => {
    document.body.dispatchEvent(new CustomEvent("window", { detail: { axis, range } }));
    const mine = ++asked;
    const query = new URLSearchParams({ x: axis, points: String(Math.max(100, Math.min(2000, box.clientWidth))) });
    if (range) { query.set("from", String(range[0])); query.set("to", String(range[1])); }
    const answer = await fetch("/series?" + query);
    if (!answer.ok) return;
    const found = await answer.json();
    if (mine !== asked) return;  // it was asked for something else meanwhile
    data = found;
    refresh();
  };
  box.addEventListener("dblclick", () => { range = null; load(); });
  const turn = (to) => {
    axis = to;
    toggle.textContent = axis === "step" ? "by time" : "by step";
  };
  toggle.addEventListener("click", (event) => {
    event.preventDefault();
    turn(axis === "step" ? "time" : "step");
    range = null; load();
  });
  // A part of what is drawn below is a part of this: of the machines in time, of the steps' time on the axis here.
  document.body.addEventListener("zoom", (event) => {
    event.preventDefault();
    if (event.detail.range) turn(event.detail.axis);
    ({ range } = event.detail); load();
  });
  document.body.addEventListener("look", load);
  window.addEventListener("resize", () => { if (data) draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (data) draw(); });
  load();
})();
