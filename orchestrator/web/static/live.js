// Keeps an open page live: the server notifies it of each new observation of the run, and it redraws itself.
"use strict";
(() => {
  let source = null;
  const mark = (words) => {
    const element = document.getElementById("live-mark");
    if (element) element.title = words;
    document.body.classList.toggle("lost", words !== "live");
  };
  const open = () => {
    if (source || document.hidden) return;  // browsers limit connections, so hidden pages use none
    source = new EventSource("/live");
    source.addEventListener("open", () => mark("live"));
    source.addEventListener("error", () => mark("not connected; retrying"));
    source.addEventListener("observation", (event) => {
      mark("live");
      document.body.dispatchEvent(new CustomEvent("observation", { detail: event.data }));
    });
  };
  const close = () => {
    if (source) source.close();
    source = null;
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return close();
    open();
    document.body.dispatchEvent(new CustomEvent("observation"));  // show what changed while the page was hidden
  });
  window.addEventListener("pagehide", close);
  window.addEventListener("pageshow", open);
  open();
})();
