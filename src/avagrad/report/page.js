"use strict";
// The text of a cell is shown next to the pointer or the finger.
const box = document.getElementById("hover");
const hover = (event) => {
  const cell = event.target.closest ? event.target.closest("[data-text]") : null;
  box.hidden = !cell;
  if (!cell) return;
  box.textContent = cell.dataset.text;
  const above = event.clientY + 18 + box.offsetHeight > innerHeight;
  box.style.left = Math.max(6, Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 6)) + "px";
  box.style.top = (above ? event.clientY - box.offsetHeight - 10 : event.clientY + 18) + "px";
};
document.addEventListener("pointermove", hover);
document.addEventListener("click", hover);
document.addEventListener("scroll", () => { box.hidden = true; }, true);

// A click on a heading sorts by its column, and another one the other way round; empty cells come last.
const value = (text) => /^\d+:\d/.test(text) ? text.split(":").reduce((sum, part) => 60 * sum + +part, 0) : parseFloat(text);
const compare = (a, b) => {
  const [x, y] = [value(a), value(b)];
  return isNaN(x) || isNaN(y) ? a.localeCompare(b) : x - y;
};
const sort = (heading) => {
  const table = heading.closest("table"), column = heading.cellIndex;
  const sign = heading.ariaSort === "ascending" ? -1 : 1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  const keyed = [...table.tBodies[0].rows].map((row) => [row.cells[column].textContent, row]);
  keyed.sort(([a], [b]) => (!a || !b ? !a - !b : sign * compare(a, b)));
  table.tBodies[0].append(...keyed.map(([, row]) => row));
};
for (const heading of document.querySelectorAll(".rows th")) {
  heading.addEventListener("click", () => sort(heading));
  heading.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(heading); });
}

// Rows that do not hold every word are hidden. What is folded away is not searched.
for (const field of document.querySelectorAll(".rows input")) {
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of field.closest(".rows").querySelector("tbody").rows) {
      const text = [...row.cells].filter((cell) => !cell.querySelector("details")).map((cell) => cell.textContent);
      row.hidden = !words.every((word) => text.join(" ").toLowerCase().includes(word));
    }
  });
}
