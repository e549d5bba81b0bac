// What reads out the parts of every picture in a page: it comes with each, and works once.
(() => {
  const root = document.documentElement;
  if (root.courseFigures) return;
  root.courseFigures = true;

  // A timeline: each kind's upper edge as steps from point to point, in tenths of a pixel to the right and hundredths up.
  function plotOf(svg) {
    if (svg.coursePlot !== undefined) return svg.coursePlot;
    const group = svg.querySelector("[data-knots]");
    if (!group) return (svg.coursePlot = null);
    const told = group.dataset, peak = svg.querySelector("[data-peak]");
    const edges = [...group.querySelectorAll("path")].map((path) => {
      let x = 0, y = 0;
      const xs = [], ys = [], steps = path.getAttribute("d").match(/-?\d+/g).map(Number);
      for (let i = 0; i < steps.length; i += 2) {
        xs.push((x += steps[i]) / 10);
        ys.push((y += steps[i + 1]));
      }
      return {kind: path.dataset.kind.replaceAll("_", " "), xs: xs.slice(1, -1), ys: ys.slice(1, -1)};
    });
    const phases = [...svg.querySelectorAll("[data-phase]")].map((line) => [+line.getAttribute("x1"), line.dataset.phase]);
    return (svg.coursePlot = {
      group, edges, phases, knots: JSON.parse(told.knots), unit: told.unit, digits: +told.digits, one: +told.one,
      scale: +told.scale, top: +told.top, high: +told.high, stops: [...new Set(edges[0].xs)],
      peak: peak && +peak.getAttribute("d").match(/[\d.]+/)[0],
    });
  }
  function last(xs, x) {
    let low = 0, high = xs.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (xs[middle] <= x + 0.06) low = middle; else high = middle - 1;
    }
    return low;
  }
  function height({xs, ys}, x) {
    const k = last(xs, x), next = Math.min(k + 1, xs.length - 1), gap = xs[next] - xs[k];
    return ys[k] + (gap ? (ys[next] - ys[k]) * Math.max(0, (x - xs[k]) / gap) : 0);
  }
  function moment(plot, x) {
    const parts = [], places = {minimumFractionDigits: plot.digits, maximumFractionDigits: plot.digits};
    const amount = (bytes) => `${(bytes / plot.one).toLocaleString("en", places)} ${plot.unit}`;
    let below = 0;
    for (const edge of [...plot.edges].reverse()) {
      const high = height(edge, x) * plot.scale;
      if (high - below >= 0.5 * plot.one * 10 ** -plot.digits) parts.push(`${edge.kind} ${amount(high - below)}`);
      below = high;
    }
    const k = Math.max(1, plot.knots.findIndex(([, end]) => end >= x - 0.06));
    const [[from, left], [to, right]] = [plot.knots[k - 1], plot.knots[k]];
    const event = Math.round(from + ((to - from) * (x - left)) / Math.max(0.1, right - left)).toLocaleString("en");
    const phase = plot.phases.filter(([start]) => start <= x + 0.06).pop()?.[1] ?? "set-up";
    return `${phase}, event ${event}: ${amount(below)}${parts.length ? " = " + parts.join(" + ") : ""}`;
  }

  function show(page, svg, words, box) {
    let frame = page.querySelector(".course-here");
    if (!frame) {
      frame = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      frame.setAttribute("class", "course-here");
    }
    Object.entries(box).forEach(([name, value]) => frame.setAttribute(name, value));
    svg.append(frame);
    const line = page.querySelector(".course-said");
    if (line.textContent !== words) line.textContent = words;
  }
  function at(page, svg, plot, x) {
    svg.courseAt = plot.stops[last(plot.stops, x)];
    show(page, plot.group.ownerSVGElement, moment(plot, svg.courseAt), {x: svg.courseAt, y: plot.top, width: 0.01, height: plot.high});
  }
  function on(page, svg, part) {
    svg.courseAt = part;
    const box = Object.fromEntries(["x", "y", "width", "height"].map((name) => [name, part.getAttribute(name)]));
    show(page, part.ownerSVGElement, part.firstElementChild.textContent, box);
  }
  const visible = (page) => [...page.children].find((child) => child.tagName === "svg" && child.getClientRects().length);
  const parts = (svg) => [...svg.querySelectorAll("rect > title")].map((title) => title.parentNode);
  function pointed(event) {
    const page = event.target.closest?.(".course-picture"), svg = page && event.target.closest("svg");
    if (!svg) return;
    const plot = plotOf(svg), spot = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    if (plot && spot.y > plot.top - 40 && spot.y < plot.top + plot.high + 30) return at(page, svg, plot, spot.x);
    const part = event.target.closest("rect");
    if (part?.firstElementChild?.tagName === "title") on(page, svg, part);
  }
  function pressed(event) {
    const page = event.target, far = {Home: -1, End: 1}[event.key];
    const step = far ?? {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (!page.matches?.(".course-picture") || !step || event.ctrlKey || event.metaKey || event.altKey) return;
    const svg = visible(page), plot = svg && plotOf(svg);
    if (plot) {
      const {stops} = plot, now = svg.courseAt ?? plot.peak ?? stops[0];
      const next = far ? undefined : step > 0 ? stops.find((x) => x > now + 2) : stops.findLast((x) => x < now - 2);
      at(page, svg, plot, next ?? (step > 0 ? stops.at(-1) : stops[0]));
    } else {
      const all = parts(svg), now = all.indexOf(svg.courseAt);
      if (!all.length) return;
      on(page, svg, all[far ? (step > 0 ? all.length - 1 : 0) : Math.min(all.length - 1, Math.max(0, now + step))]);
    }
    event.preventDefault();
    event.stopPropagation();
  }
  function focused(event) {
    const svg = event.target.matches?.(".course-picture:focus-visible") && visible(event.target);
    if (!svg) return;
    const plot = plotOf(svg), first = plot ? null : parts(svg)[0];
    if (plot) at(event.target, svg, plot, svg.courseAt ?? plot.peak ?? plot.stops[0]);
    else if (first) on(event.target, svg, svg.courseAt ?? first);
  }
  document.addEventListener("pointermove", pointed);
  document.addEventListener("pointerdown", pointed);
  // Before the keys of JupyterLab.
  window.addEventListener("keydown", pressed, true);
  document.addEventListener("focusin", focused);
  focused({target: document.activeElement});
})();
