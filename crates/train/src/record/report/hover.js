// Shows the numbers under the pointer. The page is whole without it.
for (const card of document.querySelectorAll(".chart")) {
  const { ends, unit, series } = JSON.parse(card.querySelector("script").textContent);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  card.append(tip);
  const text = (value) =>
    unit === "percent" ? (value * 100).toFixed(2) + "%" : String(Number(value.toPrecision(4)));
  // The index of the step nearest to `at`; steps grow.
  const nearest = (steps, at) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] > at) high = middle; else low = middle;
    }
    return at - steps[low] <= steps[high] - at ? low : high;
  };
  for (const svg of card.querySelectorAll("svg")) {
    const { left, right, top, bottom } = Object.fromEntries(Object.entries(svg.dataset).map(([k, v]) => [k, +v]));
    const hover = svg.querySelector(".hover");
    const clear = () => { tip.hidden = true; hover.replaceChildren(); };
    svg.addEventListener("pointerleave", clear);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      if (x < left || x > right) return clear();
      const at = ends[0] + ((x - left) / (right - left)) * (ends[1] - ends[0]);
      const found = series.filter((s) => s.steps.length).map((s) => ({ s, i: nearest(s.steps, at) }));
      if (!found.length) return clear();
      // The line stands at the nearest point of all; series that have none near it are left out.
      const step = found.map(({ s, i }) => s.steps[i]).reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
      const reach = (ends[1] - ends[0]) * 0.02;
      const place = left + ((step - ends[0]) / (ends[1] - ends[0])) * (right - left);
      const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
      line.setAttribute("d", `M${place} ${top}V${bottom}`);
      hover.replaceChildren(line);
      tip.replaceChildren();
      const head = document.createElement("b");
      head.textContent = "step " + step.toLocaleString("en");
      tip.append(head);
      for (const { s, i } of found) {
        if (Math.abs(s.steps[i] - step) > reach) continue;
        const row = document.createElement("div");
        row.className = "key c" + s.colour;
        row.textContent = s.name + " " + text(s.values[i]);
        tip.append(row);
      }
      tip.hidden = false;
      const card_box = card.getBoundingClientRect();
      const pixels = box.left - card_box.left + (place / svg.viewBox.baseVal.width) * box.width;
      tip.style.top = event.clientY - card_box.top - tip.offsetHeight / 2 + "px";
      tip.style.left = (pixels + 14 + tip.offsetWidth > card_box.width ? pixels - 14 - tip.offsetWidth : pixels + 14) + "px";
    });
  }
}
