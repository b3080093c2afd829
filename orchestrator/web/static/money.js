// Cost over time, stacked by category, with the budget and the forecast.
"use strict";
(() => {
  const HEIGHT = 260;
  const COLOURS = {
    trainer: "--blue", spot: "--green", "on demand": "--orange", controller: "--grey", disks: "--ochre",
  };
  const box = document.getElementById("dollars"), info = document.getElementById("dollars-info");
  let data = null, plot = null;
  const usd = (v) => v == null ? "–" : v === 0 ? "$0" : "$" + v.toLocaleString("en", v >= 1000 ? { maximumFractionDigits: 0 } : { minimumFractionDigits: 2, maximumFractionDigits: 2 });
  const parts = () => Object.keys(COLOURS).filter((name) => data.usd[name]?.some((value) => value > 0));
  const showValues = (at) => {
    const last = data.x.length - 1, index = at == null || at > last ? last : at;
    const note = Object.assign(document.createElement("span"), { className: "note" });
    const sum = parts().reduce((all, part) => all + data.usd[part][index], 0);
    note.textContent = last < 0 ? "nothing spent yet" : `${usd(sum)} by ${new Date(data.x[index] * 1000).toLocaleString("en-GB")}`;
    const budget = data.budget.at(-1)?.[1];
    if (last >= 0 && budget > highest()) note.textContent += ` · the budget, ${usd(budget)}, is above the chart`;
    info.replaceChildren(...parts().map((part) => keyed(COLOURS[part], part, usd(data.usd[part][index]))), note);
  };
  // A far higher budget would flatten the chart, so it is only mentioned in the legend.
  const FAR = 2.5;
  const highest = () => {
    const least = Math.max(data.spent_usd, data.forecast?.usd ?? 0) || 1;
    return Math.max(least, ...data.budget.map(([, value]) => value).filter((value) => value <= FAR * least));
  };
  const lines = (u) => {
    const { ctx, bbox } = u, end = bbox.left + bbox.width;
    const y = (v) => Math.round(u.valToPos(v, "y", true)) + .5, x = (t) => u.valToPos(t, "x", true);
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
    ctx.lineWidth = devicePixelRatio;
    ctx.strokeStyle = colourOf("--red"); ctx.setLineDash([6, 4]);
    data.budget.forEach(([time, value], i) => {
      const until = data.budget[i + 1]?.[0];
      ctx.beginPath(); ctx.moveTo(x(time), y(value)); ctx.lineTo(until == null ? end : x(until), y(value)); ctx.stroke();
    });
    if (data.forecast && data.x.length) {
      ctx.strokeStyle = colourOf("--soft"); ctx.setLineDash([2, 4]);
      ctx.beginPath(); ctx.moveTo(x(data.x.at(-1)), y(data.spent_usd)); ctx.lineTo(x(data.forecast.time), y(data.forecast.usd)); ctx.stroke();
    }
    ctx.restore();
  };
  const draw = () => {
    plot?.destroy();
    box.replaceChildren();
    showValues(null);
    if (!data.x.length) return;
    const columns = stackUp(parts().map((part) => data.usd[part])), names = parts().reverse(), line = axisStyle();
    const end = Math.max(data.x.at(-1), data.forecast?.time ?? 0);
    const most = highest();
    plot = new uPlot({
      width: box.clientWidth, height: HEIGHT, legend: { show: false }, padding: [4, 10, 0, 0],
      series: [{}, ...names.map((part) => ({ fill: colourOf(COLOURS[part]), width: 0, points: { show: false } }))],
      scales: { x: { time: true, range: () => [data.x[0], Math.max(end, data.x[0] + 1)] }, y: { range: () => [0, most * 1.05] } },
      cursor: { drag: { x: false, y: false }, points: { show: false } },
      axes: [{ ...line, size: 26, ...timeAxis }, { ...line, size: 70, values: (u, vs) => vs.map(usd) }],
      hooks: { draw: [lines], setCursor: [(u) => showValues(u.cursor.left < 0 ? null : u.cursor.idx)] },
    }, [data.x, ...columns], box);
  };
  const load = async () => {
    const answer = await fetch("/money?format=json");
    if (!answer.ok) return;
    const { over_time, money } = await answer.json();
    data = { ...over_time, spent_usd: money.spent_usd };
    draw();
    box.dataset.points = String(data.x.length);
  };
  document.body.addEventListener("observation", load);
  const redraw = () => { if (data) draw(); };
  window.addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  load();
})();
