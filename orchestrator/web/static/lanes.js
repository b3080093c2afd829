// The machines over time, a lane for each node. Drawn on one canvas; zooms with the curves if the page has them.
"use strict";
(() => {
  const LANE = 15, BAR = 9, HEAD = 18, FOOT = 18, LEFT = 70, RIGHT = 10;
  const box = document.getElementById("lanes"), canvas = box.querySelector("canvas"), ctx = canvas.getContext("2d");
  const info = document.getElementById("lanes-info"), more = document.getElementById("lanes-more"), legend = document.getElementById("lanes-legend");
  const charts = document.getElementById("charts"), count = Number(box.dataset.count);
  let axis = "step", range = null, first = 0, ended = false, data = null, requests = 0, held = null;
  const style = () => getComputedStyle(document.documentElement);
  const colours = () => {
    const all = style(), colour = (name) => all.getPropertyValue("--" + name).trim();
    return {
      requested: colour("requested"), booting: colour("booting"), loading: colour("loading"), serving: colour("serving"), idle: colour("idle"),
      draining: colour("draining"), terminating: colour("draining"), lost: colour("lost"), ink: colour("ink"), soft: colour("soft"), line: colour("line"),
      panel: colour("paper"), orange: colour("orange"), violet: colour("violet"), sel: colour("sel"),
    };
  };
  const width = () => box.clientWidth - LEFT - RIGHT;
  const x = (t) => LEFT + (t - data.from_s) / Math.max(1e-3, data.until_s - data.from_s) * width();
  const time = (px) => data.from_s + Math.min(1, Math.max(0, (px - LEFT) / width())) * (data.until_s - data.from_s);
  const clip = (px) => Math.min(LEFT + width(), Math.max(LEFT, px));
  const duration = (s) => s < 60 ? `${Math.round(s)} s` : s < 3600 ? `${(s / 60).toFixed(1)} min` : s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${(s / 86400).toFixed(1)} d`;

  const axisLine = (c, height) => {
    const apart = [1, 5, 15, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400, 172800, 604800, 2592000]
      .find((s) => s / Math.max(1e-3, data.until_s - data.from_s) * width() >= 62) ?? 31536000;
    const zone = new Date(data.from_s * 1000).getTimezoneOffset() * 60;
    ctx.fillStyle = c.soft; ctx.strokeStyle = c.line; ctx.textAlign = "center";
    for (let t = Math.ceil((data.from_s - zone) / apart) * apart + zone; t <= data.until_s; t += apart) {
      const px = Math.round(x(t)) + .5;
      ctx.beginPath(); ctx.moveTo(px, HEAD); ctx.lineTo(px, height - FOOT); ctx.stroke();
      if (px > LEFT + 16 && px < LEFT + width() - 12) ctx.fillText(onAxis(t, apart), px, height - 5);
    }
  };
  // Policy changes: a line through all lanes, with its name if it fits.
  const policyLines = (c, height) => {
    let free = LEFT;
    ctx.textAlign = "left";
    for (const change of data.policies) {
      const px = Math.round(x(change.time)) + .5, size = ctx.measureText(change.policy).width;
      ctx.strokeStyle = ctx.fillStyle = change.forks ? c.violet : c.soft;
      ctx.globalAlpha = change.forks ? .9 : .35;
      ctx.beginPath(); ctx.moveTo(px, HEAD - 3); ctx.lineTo(px, height - FOOT); ctx.stroke();
      ctx.globalAlpha = 1;
      if (px + 2 < free || px + 3 + size > LEFT + width()) continue;
      ctx.fillText(change.policy, px + 3, HEAD - 7);
      free = px + size + 12;
    }
  };
  const bar = (c, phase, from, to, top, size) => {
    const a = clip(x(from)), b = clip(x(to));
    if (b <= LEFT || a >= LEFT + width() || to <= from || !size) return;
    ctx.fillStyle = c[phase] ?? c.requested;
    ctx.fillRect(a, top, Math.max(.75, b - a), size);
  };
  const drawLane = (c, lane, row) => {
    const top = HEAD + row * LANE + (LANE - BAR) / 2;
    ctx.fillStyle = c.soft; ctx.textAlign = "left";
    let name = lane.slot;
    while (ctx.measureText(name).width > LEFT - 8) name = name.slice(0, -2) + "…";
    ctx.fillText(name, 0, top + BAR - 1);
    lane.machines.forEach((machine, i) => {
      // A machine that is still there when its replacement starts continues as a thin bar below it.
      const replaced = lane.machines[i + 1]?.spans[0][1] ?? Infinity;
      for (const [phase, from, to] of machine.spans) {
        bar(c, phase, from, Math.min(to, replaced), top, BAR);
        bar(c, phase, Math.max(from, replaced), to, top + BAR - 2, 3);
      }
      const [, begin] = machine.spans[0], end = machine.spans.at(-1)[2];
      if (machine.market === "on demand") {
        ctx.globalAlpha = .9; bar({ on: c.orange }, "on", begin, end, top + BAR + 1, 1.5); ctx.globalAlpha = 1;
      }
      if (end < data.from_s || end > data.until_s || !machine.end) return;
      const at = clip(x(end));
      ctx.fillStyle = ctx.strokeStyle = machine.end === "returned" ? c.soft : c.lost;
      if (machine.end === "refused") ctx.strokeRect(at - 3, top + 2.5, 3, BAR - 5);
      else ctx.fillRect(at - 2, top - 1.5, 2, BAR + 3);
    });
    if (lane.now && data.until_s === data.end_s) {
      ctx.fillStyle = c[lane.now] ?? c.requested;
      ctx.fillRect(LEFT + width() + 3, top + 1, BAR - 2, BAR - 2);
    }
  };
  const draw = () => {
    if (!data) return;
    const c = colours(), height = HEAD + data.lanes.length * LANE + FOOT, dense = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(box.clientWidth * dense); canvas.height = Math.round(height * dense);
    ctx.setTransform(dense, 0, 0, dense, 0, 0);
    ctx.font = "11px " + style().getPropertyValue("--sans");
    ctx.lineWidth = 1;
    axisLine(c, height);
    data.lanes.forEach((lane, row) => drawLane(c, lane, row));
    policyLines(c, height);
    if (held && held.to != null) {
      ctx.fillStyle = c.sel;
      ctx.fillRect(Math.min(held.from, held.to), HEAD, Math.abs(held.to - held.from), height - HEAD - FOOT);
    }
    canvas.setAttribute("aria-label", `${data.lanes.length} lanes of machines: ${data.lanes.map((lane) => `${lane.slot} ${lane.now}`).join(", ")}`);
    box.dataset.lanes = String(data.lanes.length);
    box.dataset.from = String(data.from_s); box.dataset.to = String(data.until_s);
  };
  const button = (words, then) => {
    const element = Object.assign(document.createElement("button"), { type: "button", textContent: words });
    element.addEventListener("click", () => { then(); load(); });
    return element;
  };
  const drawPager = () => {
    const { total, lanes } = data, parts = [];
    if (total > lanes.length) {
      if (first > 0) parts.push(button("previous", () => { first = Math.max(0, first - count); }));
      const note = document.createElement("span");
      note.className = "note";
      note.textContent = lanes.length ? `${(first + 1).toLocaleString("en")} to ${(first + lanes.length).toLocaleString("en")} of ${total.toLocaleString("en")}, latest change first` : "none here";
      parts.push(note);
      if (first + lanes.length < total) parts.push(button("next", () => { first += count; }));
    }
    if (data.ended) parts.push(button(ended ? "hide ended nodes" : `show ${data.ended.toLocaleString("en")} ended nodes`, () => { ended = !ended; first = 0; }));
    more.replaceChildren(...parts);
  };
  const hit = (px, py) => {
    const lane = data.lanes[Math.floor((py - HEAD) / LANE)];
    if (!lane || py < HEAD) return null;
    const t = time(px), slack = (data.until_s - data.from_s) / Math.max(1, width()) * 2;
    for (const machine of [...lane.machines].reverse()) {
      const span = machine.spans.find(([, from, to]) => t >= from - slack && t <= to + slack);
      if (span) return { machine, span };
    }
    return { slot: lane.slot };
  };
  const showDetails = (event) => {
    const at = data && hit(event.offsetX, event.offsetY);
    if (!at) { info.textContent = info.dataset.idle; return; }
    const when = new Date(time(event.offsetX) * 1000).toLocaleString("en-GB");
    if (!at.machine) { info.textContent = `${when} · ${at.slot}: no machine`; return; }
    const { machine, span: [phase, from, to] } = at, last = machine.spans.at(-1)[2];
    const parts = [when, `${machine.node} ${phase}, ${duration(to - from)}`, machine.pool.endsWith(machine.market) ? "" : machine.market, machine.pool];
    if (machine.price_usd_per_h) parts.push(`$${machine.price_usd_per_h.toFixed(2)} an hour`);
    if (machine.end) parts.push(`${machine.end} after ${duration(last - machine.spans[0][1])}: ${machine.reason}`);
    else parts.push(machine.reason);
    info.textContent = parts.filter(Boolean).join(" · ");
  };
  const zoom = (to) => {
    const event = new CustomEvent("zoom", { detail: { axis: "time", range: to }, cancelable: true });
    if (document.body.dispatchEvent(event)) { axis = "time"; range = to; first = 0; load(); }
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (!data || event.button) return;
    canvas.setPointerCapture(event.pointerId);
    held = { from: clip(event.offsetX), to: null };
    showDetails(event);
  });
  canvas.addEventListener("pointermove", (event) => {
    showDetails(event);
    if (held) { held.to = clip(event.offsetX); draw(); }
  });
  canvas.addEventListener("pointerup", () => {
    const { from, to } = held ?? {};
    held = null;
    if (to != null && Math.abs(to - from) >= 6) zoom([time(Math.min(from, to)), time(Math.max(from, to))]);
    else draw();
  });
  canvas.addEventListener("pointercancel", () => { held = null; draw(); });
  canvas.addEventListener("pointerleave", () => { info.textContent = info.dataset.idle; });
  canvas.addEventListener("dblclick", () => zoom(null));
  const load = async () => {
    const mine = ++requests;
    const query = new URLSearchParams({ x: axis, first: String(first), count: String(count), ended: ended ? "yes" : "no" });
    if (range) { query.set("from", String(range[0])); query.set("to", String(range[1])); }
    const answer = await fetch("/lanes?" + query);
    if (!answer.ok) return;
    const found = await answer.json();
    if (mine !== requests) return;  // a newer request was sent
    data = found;
    draw();
    drawPager();
    legend.hidden = false;
  };
  document.body.addEventListener("window", (event) => {
    ({ axis, range } = event.detail);
    load();
  });
  if (!charts) document.body.addEventListener("observation", load);
  window.addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  load();
})();
