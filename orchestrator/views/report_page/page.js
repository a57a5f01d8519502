"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const axes = { step: "step", tokens: "tokens", time: "time (UTC)" };
let axis = "step";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
/* plotly shows Date objects in the reader's zone and texts as they stand; the tables are in UTC. */
const utc = (unix) => new Date(unix * 1000).toISOString().slice(0, -1);
const xs = (series, by) => (by === "time" ? series.unix.map(utc) : series[by]);

function layout(xTitle, extra) {
  const grid = { gridcolor: colour("--grid"), zerolinecolor: colour("--grid"), linecolor: colour("--line"), automargin: true };
  return Object.assign({
    margin: { l: 62, r: 18, t: 12, b: 44 }, hovermode: "closest", showlegend: false,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--ink"), size: 12, family: "system-ui, Segoe UI, Roboto, sans-serif" },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
    xaxis: Object.assign({ title: { text: xTitle, standoff: 10 } }, grid),
    yaxis: Object.assign({}, grid),
  }, extra);
}

function line(series, by, field, name, style, hover) {
  return { type: "scatter", mode: "lines", x: xs(series, by), y: series[field], name, line: style,
           hovertemplate: hover, customdata: series.step };
}

/* Incidents and checkpoints on a time axis: a dashed line each, and a mark to point at. */
function marks(top) {
  const at = (list) => list.map((mark) => utc(mark.unix));
  const text = (list) => list.map((mark) => mark.text);
  const trace = (list, symbol, hue, y, size) => ({
    type: "scatter", mode: "markers", x: at(list), y: list.map(() => y), yaxis: "y2", text: text(list), hoverinfo: "text",
    marker: { symbol, size, color: colour(hue) },
  });
  const shapes = data.incidents.map((mark) => ({
    type: "line", x0: utc(mark.unix), x1: utc(mark.unix), yref: "paper", y0: 0, y1: top,
    line: { color: colour("--bad"), width: 1, dash: "dot" },
  }));
  const traces = [trace(data.incidents, "triangle-down", "--bad", 0.97, 12),
                  trace(data.checkpoints, "diamond", "--good", 0.03, 7)];
  const overlay = { overlaying: "y", range: [0, 1], visible: false, fixedrange: true };
  return { traces, shapes, overlay };
}

function draw(id, traces, spec) {
  const place = document.getElementById(id);
  if (place) Plotly.react(place, traces, spec, { displayModeBar: false, responsive: true });
}

function drawLoss() {
  const hover = "step %{customdata:,}<br>loss %{y:.4f}<extra>%{fullData.name}</extra>";
  const traces = [
    ...data.recomputed.map((part) => line(part, axis, "loss", "trained again",
      { color: colour("--ghost"), width: 8 }, hover)),
    /* Over time a restart is a gap; over steps and tokens the line goes on. */
    ...(axis === "time" ? data.kept_spells : [data.kept]).map((part) => line(part, axis, "loss", "loss",
      { color: colour("--main"), width: 1.8 }, hover)),
  ];
  if (data.validation.step.length) {
    const field = axis === "tokens" ? null : data.validation;
    if (field) traces.push({ type: "scatter", mode: "markers", x: xs(field, axis), y: field.loss, name: "held-out loss",
      customdata: field.step, hovertemplate: hover, marker: { color: colour("--third"), size: 10, symbol: "star" } });
  }
  const spec = layout(axes[axis], {});
  if (axis === "time") {
    const extra = marks(1);
    traces.push(...extra.traces);
    Object.assign(spec, { shapes: extra.shapes, yaxis2: extra.overlay });
  }
  draw("loss", traces, spec);
}

function drawTimed(id, field, title, hue, hover, rangemode) {
  const extra = marks(1);
  const spec = layout("time (UTC)", { shapes: extra.shapes, yaxis2: extra.overlay });
  spec.yaxis.rangemode = rangemode;
  spec.yaxis.tickformat = ",";
  const style = { color: colour(hue), width: 1.6 };
  const parts = data.spells.map((part) => line(part, "time", field, title, style, hover));
  draw(id, [...parts, ...extra.traces], spec);
}

function drawAll() {
  drawLoss();
  drawTimed("speed", "tokens_per_s", "tokens per second", "--second", "step %{customdata:,}<br>%{y:,.0f} tokens/s<extra></extra>", "tozero");
  drawTimed("mfu", "mfu", "MFU, %", "--third", "step %{customdata:,}<br>%{y:.1f} %<extra></extra>", "tozero");
  draw("rate", [line(data.kept, "step", "lr", "learning rate", { color: colour("--main"), width: 1.8 },
    "step %{x:,}<br>learning rate %{y:.3e}<extra></extra>")], layout("step", {}));
  draw("norm", [line(data.kept, "step", "grad_norm", "gradient norm", { color: colour("--second"), width: 1.4 },
    "step %{x:,}<br>gradient norm %{y:.3f}<extra></extra>")], layout("step", {}));
  /* Norms of blocks lie powers of ten apart. Steps are names, so that those without a record take no room. */
  const blocks = data.grad_norms;
  const spec = layout("step", {});
  Object.assign(spec.xaxis, { type: "category" });
  Object.assign(spec.yaxis, { autorange: "reversed" });
  draw("blocks", [{ type: "heatmap", x: blocks.step.map(String), y: blocks.block, customdata: blocks.norm,
    z: blocks.norm.map((row) => row.map((norm) => (norm > 0 ? Math.log10(norm) : null))), colorscale: "Viridis",
    colorbar: { title: { text: "log10" }, thickness: 12 },
    hovertemplate: "step %{x}<br>%{y}<br>gradient norm %{customdata:.3e}<extra></extra>" }], spec);
}

for (const button of document.querySelectorAll(".switch button")) {
  button.addEventListener("click", () => {
    axis = button.dataset.axis;
    for (const other of document.querySelectorAll(".switch button")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    drawLoss();
  });
}
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll();
