// How a moment is written on an axis whose marks are so many seconds apart.
"use strict";
const onAxis = (time_s, apart_s) => {
  const at = new Date(time_s * 1000);
  const midnight = at.getHours() === 0 && at.getMinutes() === 0 && at.getSeconds() === 0;
  if (apart_s >= 43200 || (apart_s >= 60 && midnight)) return at.toLocaleDateString("en-GB", { day: "numeric", month: "short" });
  return at.toLocaleTimeString("en-GB", apart_s >= 60 ? { hour: "2-digit", minute: "2-digit" } : {});
};
