// Tells the studios on a page which theme the page has: when they have loaded, and when it changes.
(() => {
  const tell = () => {
    const theme = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
    for (const frame of document.querySelectorAll(".studio iframe")) {
      frame.contentWindow.postMessage({ theme }, location.origin);
    }
  };
  window.addEventListener("message", ({ origin, data }) => {
    if (origin === location.origin && data?.studio === "loaded") tell();
  });
  new MutationObserver(tell).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
})();
