// Draws every chart in the colours of the theme in force, and again when that changes.
(function () {
  "use strict";
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function themed(value, style) {
    if (typeof value === "string") {
      return /^\$[a-z]+[0-9]?$/.test(value) ? style.getPropertyValue("--" + value.slice(1)).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => themed(item, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, themed(item, style)]));
    }
    return value;
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim();
    const rule = style.getPropertyValue("--rule").trim();
    for (const [id, spec] of Object.entries(specs)) {
      const { data, layout } = themed(spec, style);
      for (const name of ["xaxis", "yaxis"]) {
        layout[name] = { gridcolor: rule, linecolor: rule, automargin: true, fixedrange: name === "yaxis", ...layout[name] };
      }
      Plotly.react(document.getElementById(id), data, {
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: "system-ui, sans-serif", size: 12, color: ink },
        margin: { l: 44, r: 12, t: 24, b: 40 },
        hoverlabel: { namelength: -1 },
        ...layout,
      }, { responsive: true, displaylogo: false, displayModeBar: false });
    }
  }

  draw();
  dark.addEventListener("change", draw);
})();
