// Keeps an open page live: asks for the number of the server's newest observation, and has the page redrawn.
"use strict";
(() => {
  const EVERY_MS = 2000;
  let known = Number(document.body.dataset.observation), timer = null;
  const mark = (words) => {
    const element = document.getElementById("live-mark");
    if (element) element.title = words;
    document.body.classList.toggle("lost", words !== "live");
  };
  const ask = async () => {
    try {
      const { number } = await (await fetch("/live")).json();
      mark("live");
      if (number !== known) document.body.dispatchEvent(new CustomEvent("observation"));
      known = number;
    } catch {
      mark("not connected; retrying");
    }
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(ask, EVERY_MS);
  };
  document.addEventListener("visibilitychange", ask);
  ask();
})();
