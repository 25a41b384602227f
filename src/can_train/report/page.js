
"use strict";
// Values where the pointer is, and zoom. Without this script the page shows the same charts.
(() => {
  const GRID = 2000, SVG = document.querySelector("svg")?.namespaceURI;
  const made = (name, attributes, parent) => {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return parent.appendChild(element);
  };
  const number = (value, axis) => {
    const shown = axis.decades ? 10 ** value : value / axis.unit;
    return shown.toLocaleString("en", { maximumSignificantDigits: axis.whole ? 21 : 5 }) + axis.suffix;
  };
  // The last point that is not after x: limits hold, and losses stay known, until the next point.
  const last = (points, x) => {
    let low = 0, high = points.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][0] <= x) low = middle + 1; else high = middle;
    }
    return points[Math.max(low - 1, 0)];
  };
  const nearest = (points, x) => points.reduce((best, each) =>
    Math.abs(each[0] - x) < Math.abs(best[0] - x) ? each : best);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  function show(plot, share) {
    const [low, high] = plot.view, drawn = plot.series.filter(each => each.points.length);
    if (!drawn.length) return;
    const main = drawn.reduce((most, each) => each.points.length > most.points.length ? each : most);
    const at = nearest(main.points, low + share * (high - low))[0];
    plot.at = Math.min(Math.max((at - low) / (high - low), 0), 1);
    tip.replaceChildren();
    const line = (text, sample) => {
      const row = document.createElement("div");
      if (sample) row.append(sample.cloneNode(true));
      row.append(text);
      tip.append(row);
    };
    line(`${plot.x.label}: ${number(at, plot.x)}`);
    for (const each of drawn) {
      const marks = each.kind === "dots" || each.kind === "crosses";
      const point = (marks ? nearest : last)(each.points, at);
      if (marks && Math.abs(point[0] - at) > (high - low) / 50) continue;
      if (point[1] === null) continue;
      const range = each.low ? `${number(last(each.low, at)[1], plot.y)} – ` : "";
      // A cross lies where there is room for it.
      const value = each.kind === "crosses" ? "" : `: ${range}${number(point[1], plot.y)}`;
      line(each.name + value, each.sample);
    }
    for (const end of ["x1", "x2"]) plot.cursor.setAttribute(end, `${100 * plot.at}%`);
    plot.cursor.style.display = "";
    tip.hidden = false;
    const box = plot.svg.getBoundingClientRect(), wide = document.documentElement.clientWidth;
    const left = box.left + plot.at * box.width, besides = left + 14 + tip.offsetWidth > wide;
    tip.style.left = `${Math.max(besides ? left - 14 - tip.offsetWidth : left + 14, 4) + scrollX}px`;
    tip.style.top = `${box.top + scrollY + 8}px`;
  }
  function hide(plot) {
    tip.hidden = true;
    plot.cursor.style.display = "none";
  }

  function zoom(plot, low, high) {
    const { x, svg } = plot, span = x.high - x.low;
    low = Math.max(low, x.low);
    high = Math.min(high, x.high);
    if (high - low < span / 400) return;
    plot.view = [low, high];
    const is_whole = low === x.low && high === x.high;
    for (const part of svg.querySelectorAll("svg[viewBox]")) {
      const [, , , height] = part.getAttribute("viewBox").split(" ");
      part.setAttribute("viewBox", `${GRID * (low - x.low) / span} 0 ${GRID * (high - low) / span} ${height}`);
      part.setAttribute("overflow", is_whole ? "visible" : "hidden");
    }
    for (const mark of svg.querySelectorAll("[data-at]")) {
      const share = (x.low + mark.dataset.at * span - low) / (high - low);
      mark.setAttribute(mark.localName === "circle" ? "cx" : "x", `${100 * share}%`);
      mark.style.display = share < 0 || share > 1 ? "none" : "";
    }
    if (is_whole) plot.ticks.replaceChildren(...plot.first);
    else {
      plot.ticks.replaceChildren();
      const least = (high - low) / x.unit / 6, power = 10 ** Math.floor(Math.log10(least));
      let step = [1, 2, 5, 10].map(each => each * power).find(each => each >= least * (1 - 1e-9));
      if (x.whole) step = Math.max(step, 1);
      for (let index = Math.ceil(low / x.unit / step - 1e-9); index * step * x.unit <= high; index++) {
        const place = `${100 * (index * step * x.unit - low) / (high - low)}%`;
        made("line", { class: "grid", x1: place, x2: place, y1: 0, y2: "100%" }, plot.ticks);
        const text = made("text", { x: place, y: "100%", dy: 17, "text-anchor": "middle" }, plot.ticks);
        text.textContent = (index * step).toLocaleString("en", { maximumSignificantDigits: 6 });
      }
    }
    plot.button.hidden = is_whole;
    hide(plot);
  }

  function zooming(plot) {
    const { svg } = plot, caption = svg.parentElement.querySelector("figcaption");
    plot.button = document.createElement("button");
    plot.button.type = "button";
    plot.button.textContent = "Show all steps";
    plot.button.hidden = true;
    plot.button.onclick = () => zoom(plot, plot.x.low, plot.x.high);
    const hint = document.createElement("span");
    hint.className = "muted hint";
    hint.textContent = "Drag across the steps to zoom in.";
    caption.append(hint, plot.button);
    svg.classList.add("zoom");
    let from = null;
    svg.addEventListener("pointerdown", event => {
      if (event.button || event.target.closest("a")) return;
      from = plot.share(event);
      svg.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    svg.addEventListener("pointermove", event => {
      if (from === null) return;
      const to = plot.share(event);
      plot.band.setAttribute("x", `${100 * Math.min(from, to)}%`);
      plot.band.setAttribute("width", `${100 * Math.abs(to - from)}%`);
    });
    const end = event => {
      if (from === null) return;
      const [low, high] = plot.view, shares = [from, plot.share(event)].sort((a, b) => a - b);
      from = null;
      plot.band.setAttribute("width", 0);
      const [left, right] = shares.map(share => low + share * (high - low));
      if (event.type === "pointerup" && shares[1] - shares[0] > 0.01) zoom(plot, left, right);
    };
    svg.addEventListener("pointerup", end);
    svg.addEventListener("pointercancel", end);
    svg.addEventListener("dblclick", () => zoom(plot, plot.x.low, plot.x.high));
  }

  function keys(plot, event) {
    const [low, high] = plot.view, middle = low + (plot.at ?? 0.5) * (high - low);
    const moves = { ArrowLeft: -0.02, ArrowRight: 0.02 };
    if (event.key in moves) show(plot, Math.min(Math.max((plot.at ?? 0.5) + moves[event.key], 0), 1));
    else if (event.key === "Escape") hide(plot);
    else if (plot.button && event.key === "+") zoom(plot, middle - (high - low) / 4, middle + (high - low) / 4);
    else if (plot.button && event.key === "-") zoom(plot, middle - (high - low), middle + (high - low));
    else return;
    event.preventDefault();
  }

  for (const svg of document.querySelectorAll("svg[data-x]")) {
    const plot = { svg, x: JSON.parse(svg.dataset.x), y: JSON.parse(svg.dataset.y) };
    const samples = svg.parentElement.querySelectorAll(".legend li");
    plot.view = [plot.x.low, plot.x.high];
    plot.series = [...svg.querySelectorAll("[data-points]")].map(each => ({
      name: each.dataset.name, kind: each.dataset.kind, points: JSON.parse(each.dataset.points),
      low: each.dataset.low && JSON.parse(each.dataset.low),
      sample: [...samples].find(item => item.textContent === each.dataset.name)?.querySelector("svg"),
    }));
    plot.ticks = svg.querySelector(".ticks");
    plot.first = [...plot.ticks.childNodes];
    // Where nothing is drawn, the pointer is to be seen too.
    svg.prepend(made("rect", { class: "sensitive", width: "100%", height: "100%" }, svg));
    plot.band = made("rect", { class: "band", y: 0, height: "100%", width: 0 }, svg);
    plot.cursor = made("line", { class: "axis cursor", y1: 0, y2: "100%" }, svg);
    plot.cursor.style.display = "none";
    plot.share = event => {
      const box = svg.getBoundingClientRect();
      return Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    };
    if (svg.dataset.zoom !== undefined) zooming(plot);
    svg.setAttribute("tabindex", 0);
    svg.addEventListener("pointermove", event => show(plot, plot.share(event)));
    svg.addEventListener("pointerleave", () => hide(plot));
    svg.addEventListener("blur", () => hide(plot));
    svg.addEventListener("keydown", event => keys(plot, event));
  }
})();
