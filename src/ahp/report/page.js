// What moves on the page: values of curves under the pointer, timelines that zoom, a page that reloads itself.
"use strict";
const MOST_ZOOM = 400, LETTER_PX = 7.5;

function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle; else high = middle;
  }
  return wanted - values[low] <= values[high] - wanted ? low : high;
}

function short(value) {
  const size = Math.abs(value);
  return size >= 1e5 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
}

function readable(chart) {
  const told = JSON.parse(chart.querySelector("script").textContent), output = chart.querySelector("output");
  const area = chart.querySelector(".area"), line = area.appendChild(document.createElement("span"));
  line.className = "cursor";
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    const wanted = told.low + share * (told.high - told.low);
    const found = told.curves.filter(([, x]) => x.length).map(([name, x, y]) => [name, x, y, nearest(x, wanted)]);
    if (!found.length) return;
    const closest = found.reduce((a, b) => Math.abs(a[1][a[3]] - wanted) <= Math.abs(b[1][b[3]] - wanted) ? a : b);
    const at = closest[1][closest[3]];
    line.style.left = 100 * (at - told.low) / (told.high - told.low) + "%";
    line.style.display = "block";
    output.textContent = [`${told.x} ${short(at)}`, ...found.map(([name, , y, i]) => `${name} ${short(y[i])}`)].join(" \u00b7 ");
  });
  area.addEventListener("pointerleave", () => { line.style.display = "none"; output.textContent = ""; });
}

function unitWords(seconds, step) {
  const [unit, size] = step >= 1 ? ["s", 1] : step >= 1e-3 ? ["ms", 1e-3] : ["us", 1e-6];
  return +(seconds / size).toPrecision(6) + " " + unit;
}

function zoomable(figure) {
  const scroll = figure.querySelector(".scroll"), lanes = figure.querySelector(".lanes"), output = figure.querySelector("output");
  const whole = +figure.dataset.seconds, bars = [...figure.querySelectorAll(".lane i:not(.in)")], axis = figure.querySelector(".x");
  let zoom = 1;

  function label() {
    const width = scroll.clientWidth * zoom / 100;
    for (const bar of bars) {
      const name = bar.title.split(":")[0];
      const words = parseFloat(bar.style.width) * width > LETTER_PX * name.length + 4 ? name : "";
      if (bar.textContent !== words) bar.textContent = words;
    }
    const wanted = whole / Math.max(2, scroll.clientWidth * zoom / 130), size = 10 ** Math.floor(Math.log10(wanted));
    const step = [1, 2, 5, 10].map((f) => f * size).find((s) => s >= wanted * 0.999);
    axis.replaceChildren(...Array.from({length: Math.floor(whole / step + 1e-9) + 1}, (_, number) => {
      const tick = document.createElement("span");
      tick.style.left = 100 * number * step / whole + "%";
      tick.textContent = unitWords(number * step, step);
      return tick;
    }));
  }

  function to(wanted, at) {
    const offset = at === undefined ? scroll.clientWidth / 2 : at;
    const share = (scroll.scrollLeft + offset) / (scroll.clientWidth * zoom);
    zoom = Math.min(MOST_ZOOM, Math.max(1, wanted));
    lanes.style.width = 100 * zoom + "%";
    scroll.scrollLeft = share * scroll.clientWidth * zoom - offset;
    figure.dataset.zoomed = zoom > 1 ? "yes" : "";
    label();
  }

  for (const button of figure.querySelectorAll("button"))
    button.addEventListener("click", () => to(zoom * +button.dataset.zoom));
  scroll.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    to(zoom * (event.deltaY < 0 ? 1.25 : 0.8), event.clientX - scroll.getBoundingClientRect().left);
  }, {passive: false});
  scroll.addEventListener("dblclick", (event) => to(zoom * 2, event.clientX - scroll.getBoundingClientRect().left));
  lanes.addEventListener("pointerover", (event) => { output.textContent = event.target.title || ""; });
  new ResizeObserver(label).observe(scroll);
}

function loadAgain(every) {
  // Not while a timeline is zoomed: the zoom would be lost.
  setInterval(() => { if (!document.querySelector("[data-zoomed=yes]") && !document.hidden) location.reload(); }, 1000 * every);
}

addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".chart").forEach(readable);
  document.querySelectorAll(".timeline").forEach(zoomable);
  const every = +document.body.dataset.every;
  if (every) loadAgain(every);
});
