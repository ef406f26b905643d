"use strict";
// What a cell holds is shown beside the pointer, the finger, or the cell that has the focus.
const box = document.getElementById("told");
const show = (cell, x, y) => {
  box.textContent = cell.dataset.told;
  box.hidden = false;
  const left = Math.min(x + 14, innerWidth - box.offsetWidth - 6);
  const above = y + 18 + box.offsetHeight > innerHeight;
  box.style.left = Math.max(6, left) + "px";
  box.style.top = (above ? y - box.offsetHeight - 10 : y + 18) + "px";
};
const cellOf = (event) => event.target.closest ? event.target.closest("[data-told]") : null;
document.addEventListener("pointermove", (event) => {
  const cell = cellOf(event);
  if (cell) show(cell, event.clientX, event.clientY); else box.hidden = true;
});
document.addEventListener("click", (event) => {
  const cell = cellOf(event);
  if (cell) show(cell, event.clientX, event.clientY); else box.hidden = true;
});
document.addEventListener("scroll", () => { box.hidden = true; }, true);
