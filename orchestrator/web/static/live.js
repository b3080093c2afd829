// What happens while a page is open: it hears of each new look at the run, and draws itself again.
"use strict";
(() => {
  let source = null;
  const mark = (words) => {
    const there = document.getElementById("live-mark");
    if (there) there.title = words;
    document.body.classList.toggle("lost", words !== "live");
  };
  const open = () => {
    if (source || document.hidden) return;  // a browser has few connections: none for a page that nobody sees
    source = new EventSource("/live");
    source.addEventListener("open", () => mark("live"));
    source.addEventListener("error", () => mark("not connected; it tries again"));
    source.addEventListener("look", (event) => {
      mark("live");
      document.body.dispatchEvent(new CustomEvent("look", { detail: event.data }));
    });
  };
  const close = () => {
    if (source) source.close();
    source = null;
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return close();
    open();
    document.body.dispatchEvent(new CustomEvent("look"));  // what came while nobody looked
  });
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  open();
})();
