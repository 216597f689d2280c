// Charts: a line for each series, beside them the newest values, or those under the pointer, with every digit, and all values as a
// table on demand.

import { exact, h, table } from "./dom.js";

const COLOURS = ["#1f6fd0", "#c45a00", "#17803d", "#9b3fb5", "#b02a37", "#00808a"];
// A dash of its own for each series of a chart: none is told by its colour alone.
const dashOf = (i) => (i < 3 ? [[], [8, 4], [2, 4]][i] : [8, 4, ...Array(i - 2).fill([2, 4]).flat()]);
const HEIGHT = 190;
const MOST_TABLE_ROWS = 200;
const charts = new Set();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const { chart } of charts) chart.redraw(); });

const sizes = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) target.chart?.setSize({ width: Math.max(contentRect.width, 120), height: HEIGHT });
});

const short = (value) => (Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(1) : String(+value.toPrecision(6)));

// How the line of a series looks.
function key(i) {
  const [svg, line] = ["svg", "line"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  const look = { x2: 40, y1: 3, y2: 3, stroke: COLOURS[i % 6], "stroke-width": 3, "stroke-dasharray": dashOf(i).join(" ") || "none" };
  for (const [name, value] of Object.entries(look)) line.setAttribute(name, value);
  svg.setAttribute("class", "key");
  svg.setAttribute("aria-hidden", "true");
  svg.append(line);
  return svg;
}

// series: [[label, values], ...] over xs; null is no value. bands: [high, low], places of two series between which is filled.
// Returns a figure; `figure.show(xs, series)` draws other values.
export function chart(title, xName, xs, series, { points = false, bands = [] } = {}) {
  const place = h("div", { class: "plot", role: "img" });
  const values = h("dl", { class: "values" });
  const details = h("details", {}, h("summary", {}, "Values"));
  const at = h("span", { class: "at soft", "aria-hidden": "true" });
  const figure = h("figure", {}, h("figcaption", {}, title), at, place, values, details);
  let now = [xs, series];
  let cells = [];
  const ink = getComputedStyle(document.documentElement);
  const axis = { stroke: () => ink.getPropertyValue("--ink"), grid: { stroke: () => ink.getPropertyValue("--line"), width: 1 }, ticks: { width: 0 } };
  const options = {
    width: 430, height: HEIGHT, legend: { show: false }, cursor: { drag: { x: true, y: false } }, hooks: { setCursor: [() => tell()] }, scales: { x: { time: false } },
    axes: [{ ...axis, size: 28 }, { ...axis, size: 58, values: (_, splits) => splits.map((value) => short(value)) }],
    bands: bands.map(([high, low]) => ({ series: [high + 1, low + 1], fill: `${COLOURS[low % 6]}2e` })),
    series: [{ label: xName }, ...series.map(([label], i) => ({
      label, stroke: COLOURS[i % 6], dash: dashOf(i), width: 1.5, spanGaps: true, points: points ? { show: true } : {},
    }))],
  };
  const fill = () => {
    if (!details.open) return;
    const [all, lines] = now;
    const from = Math.max(all.length - MOST_TABLE_ROWS, 0);
    const rows = [];
    for (let i = all.length - 1; i >= from; i -= 1) rows.push([all[i], ...lines.map(([, column]) => column[i])]);
    details.replaceChildren(details.firstChild, table(`${title}: the newest ${rows.length}`, [xName, ...lines.map(([label]) => label)], rows));
  };
  details.addEventListener("toggle", fill);
  const newest = (column) => column[Math.max(column.findLastIndex((value) => value != null), 0)];
  const tell = () => {
    const i = place.chart?.cursor.idx;
    at.textContent = i == null ? "" : `at ${xName} ${exact(now[0][i])}`;
    now[1].forEach(([, column], k) => { cells[k][1].textContent = exact(i == null ? newest(column) : column[i]); });
  };
  figure.show = (newXs, newSeries) => {
    now = [newXs, newSeries];
    if (cells.length !== newSeries.length) {
      cells = newSeries.map(([label], i) => [h("dt", {}, key(i), label), h("dd", { "data-series": label })]);
      values.replaceChildren(...cells.flat());
    }
    tell();
    place.setAttribute("aria-label", `${title}, ${newXs.length} points; newest: ${newSeries.map(([label, column]) => `${label} ${exact(newest(column))}`).join(", ")}`);
    place.chart?.setData([newXs, ...newSeries.map(([, column]) => column)]);
    fill();
  };
  place.chart = new uPlot(options, [xs, ...series.map(([, column]) => column)], place);
  charts.add(place);
  sizes.observe(place);
  figure.show(xs, series);
  return figure;
}

// Free the charts that are no longer on the page.
export function freeCharts() {
  for (const place of charts) {
    if (place.isConnected) continue;
    sizes.unobserve(place);
    place.chart.destroy();
    charts.delete(place);
  }
}
