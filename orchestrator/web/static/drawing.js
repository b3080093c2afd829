// Functions that the charts share.
"use strict";
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Format a time for an axis whose marks are `apart_s` seconds apart.
const onAxis = (time_s, apart_s) => {
  const at = new Date(time_s * 1000);
  const midnight = at.getHours() === 0 && at.getMinutes() === 0 && at.getSeconds() === 0;
  if (apart_s >= 43200 || (apart_s >= 60 && midnight)) return at.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return at.toLocaleTimeString("en-GB", apart_s >= 60 ? { hour: "2-digit", minute: "2-digit" } : {});
};
const timeAxis = { values: (u, times, _at, _space, apart_s) => times.map((t) => onAxis(t, apart_s)) };
const stepAxis = { incrs: [0, 1, 2, 3, 4, 5, 6].flatMap((tens) => [1, 2, 5].map((times) => times * 10 ** tens)) };  // no half steps
const axisStyle = () => ({
  stroke: colourOf("--soft"), grid: { stroke: colourOf("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif",
});

// Stack the columns, the highest first: drawn in that order, each covers the ones behind it.
const stackUp = (columns) => {
  const sums = new Array(columns[0]?.length ?? 0).fill(0), found = [];
  for (const column of columns) found.unshift(column.map((value, i) => sums[i] += value));
  return found;
};

// A coloured key, its name, and its value.
const keyed = (colour, name, words) => {
  const entry = document.createElement("span"), key = document.createElement("i");
  key.style.setProperty("--key", `var(${colour})`);
  entry.append(key, `${name} `, Object.assign(document.createElement("b"), { textContent: words }));
  return entry;
};
