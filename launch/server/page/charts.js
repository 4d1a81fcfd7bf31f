"use strict";
// Drawing, and nothing else: every chart takes its figures whole and draws them anew.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function prepare(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return { pen, width, height };
}

function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * unit).find((step) => step >= value * 0.999);
}

// series: [{values: [number|null], color}], oldest first, drawn over `slots` places.
function lineChart(canvas, series, { slots = 120, top = null, format = String, axis = true,
  stacked = false, fill = false } = {}) {
  const { pen, width, height } = prepare(canvas);
  const left = axis ? 50 : 1, bottom = axis ? height - 6 : height - 2, head = axis ? 8 : 3;
  const sums = stacked ? series[0].values.map((_, at) =>
    series.reduce((sum, one) => sum + (one.values[at] ?? 0), 0)) : null;
  const largest = Math.max(0, ...(sums || series.flatMap((one) =>
    one.values.filter((value) => value !== null))));
  const ceiling = top ?? niceCeiling(largest);
  const x = (at, count) => left + (width - left - 2) * (slots - count + at) / Math.max(1, slots - 1);
  const y = (value) => bottom - (bottom - head) * Math.min(1, value / ceiling);
  if (axis) {
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = css("--faint");
    pen.strokeStyle = css("--line");
    pen.lineWidth = 1;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (const share of [0, 0.5, 1]) {
      const level = Math.round(y(share * ceiling)) + 0.5;
      pen.beginPath(); pen.moveTo(left, level); pen.lineTo(width, level); pen.stroke();
      pen.fillText(format(share * ceiling), left - 6, Math.max(6, level));
    }
  }
  let floor = series[0].values.map(() => 0);
  for (const { values, color } of series) {
    const upper = stacked ? values.map((value, at) => floor[at] + (value ?? 0)) : values;
    for (const [start, end] of runs(values)) {
      pen.beginPath();
      for (let at = start; at < end; at++) pen.lineTo(x(at, values.length), y(upper[at]));
      if (end - start === 1) pen.arc(x(start, values.length), y(upper[start]), 1.5, 0, 7);
      pen.strokeStyle = color; pen.lineWidth = stacked ? 1 : 2; pen.lineJoin = "round";
      if (stacked || fill) {
        const line = new Path2D();
        for (let at = start; at < end; at++) line.lineTo(x(at, values.length), y(upper[at]));
        for (let at = end - 1; at >= start; at--) line.lineTo(x(at, values.length), y(floor[at]));
        pen.globalAlpha = stacked ? 0.85 : 0.14;
        pen.fillStyle = color; pen.fill(line);
        pen.globalAlpha = 1;
      }
      if (!stacked) pen.stroke();
    }
    if (stacked) floor = upper;
  }
}

// [start, end) of every stretch without gaps.
function runs(values) {
  const found = [];
  let start = null;
  values.forEach((value, at) => {
    if (value !== null && start === null) start = at;
    if (value === null && start !== null) { found.push([start, at]); start = null; }
  });
  if (start !== null) found.push([start, values.length]);
  return found;
}

function mixed(from, to, share) {
  const parts = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  const a = parts(from), b = parts(to);
  return a.map((value, at) => Math.round(value + (b[at] - value) * share));
}

function palette() {
  const absent = mixed(css("--heat-absent"), css("--heat-absent"), 0);
  const colors = [absent];
  for (let warmth = 1; warmth < 256; warmth++) {
    colors.push(mixed(css("--heat-old"), css("--heat-new"), (warmth - 1) / 254));
  }
  return colors;
}

// One cell an expert; the grid is drawn small and enlarged without smoothing.
function heatMap(canvas, { layers, experts, cells }) {
  const colors = palette();
  const image = new ImageData(experts, layers);
  for (let at = 0; at < cells.length; at++) {
    image.data.set([...colors[cells[at]], 255], at * 4);
  }
  const small = new OffscreenCanvas(experts, layers);
  small.getContext("2d").putImageData(image, 0, 0);
  const cell = Math.max(5, Math.min(16, canvas.clientWidth / experts));
  canvas.style.height = `${Math.round(Math.min(440, cell * layers))}px`;
  const { pen, width, height } = prepare(canvas);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, 0, 0, width, height);
  if (width / experts >= 7 && height / layers >= 7) {
    pen.strokeStyle = css("--surface"); pen.lineWidth = 1;
    pen.beginPath();
    for (let at = 1; at < experts; at++) {
      pen.moveTo(at * width / experts, 0); pen.lineTo(at * width / experts, height);
    }
    for (let at = 1; at < layers; at++) {
      pen.moveTo(0, at * height / layers); pen.lineTo(width, at * height / layers);
    }
    pen.stroke();
  }
}

function drawRamp(canvas) {
  const pen = canvas.getContext("2d"), colors = palette();
  for (let at = 0; at < canvas.width; at++) {
    const color = at < 14 ? colors[0] : colors[Math.round(1 + 254 * (at - 14) / (canvas.width - 15))];
    pen.fillStyle = `rgb(${color.join(" ")})`;
    pen.fillRect(at, 0, 1, canvas.height);
  }
}
